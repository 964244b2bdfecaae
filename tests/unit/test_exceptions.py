"""Remote exceptions: rebuilt as what they were."""

from __future__ import annotations

import copy
import errno
import io
import os
import pickle
import traceback
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from torch_rpc_ext._upstream import exception_parts, exceptions
from torch_rpc_ext.errors import RefusedError


class Plain(Exception):
    """Takes a text."""


class Coded(Exception):
    """Takes a text, and more."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class Needs(Exception):
    """Takes something else, but pickle rebuilds it."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(code, where)
        self.code, self.where = code, where


class Cannot(Exception):
    """Takes something else, and pickle does not rebuild it."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"code {code} at {where}")


class Unpicklable(Exception):
    """Has what cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.function = lambda: None


class KeywordOnly(Exception):
    """Takes nothing by its place."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Slotted(Exception):
    """Has its attribute in a slot."""

    __slots__ = ("code",)

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Made(Exception):
    """Wants an argument already to be made."""

    def __new__(cls, *, code: int) -> Made:
        return super().__new__(cls)

    def __init__(self, *, code: int) -> None:
        self.code = code


class Named(Exception):
    """Makes its text of what it takes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"no such thing: {self.name}"


class Fixed(Exception):
    """Takes a text, and shows another one."""

    def __init__(self, text: str = "") -> None:
        super().__init__("always this")


class Stripped(Exception):
    """Shows its text without what stands around it."""

    def __str__(self) -> str:
        return super().__str__().strip()


class Disk(OSError):
    """Takes an argument more."""

    def __init__(self, number: int, text: str, sector: Any) -> None:
        super().__init__(number, text)
        self.sector = sector


def _described(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a callee sends, after it was pickled and read."""

    class Agent:
        def get_worker_info(self) -> str:
            return "WorkerInfo(id=1, name=worker1)"

    monkeypatch.setattr(exceptions.native_rpc, "_get_current_rpc_agent", Agent)

    def fails() -> None:
        raise error

    udf: Any = exceptions.internal.PythonUDF(fails, (), {})
    return pickle.loads(pickle.dumps(exceptions.run_function(udf)))


def travel(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """There and back, without RPC."""
    sent = _described(error, monkeypatch)
    with pytest.raises(BaseException) as raised:
        exceptions.handle_exception(sent)
    shown = "".join(traceback.format_exception_only(raised.value))
    assert "fails" in shown and "worker1" in shown
    return raised.value


@pytest.mark.parametrize("text", ["x", "back\\slash \\n \\x41", "é 世界", "100 % {}"])
def test_plain(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = travel(Plain(text), monkeypatch)
    assert type(error) is Plain and text in str(error)


def test_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    error = travel(Coded("x", 7), monkeypatch)
    assert isinstance(error, Coded) and error.code == 7


def test_constructor_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    error = travel(Needs(7, "here"), monkeypatch)
    assert isinstance(error, Needs) and (error.code, error.where) == (7, "here")
    # Through a second worker, with both tracebacks.
    again = travel(error, monkeypatch)
    assert isinstance(again, Needs) and again.code == 7 and len(again.__notes__) == 1


def test_a_text_without_the_traceback_gets_it_as_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, text in ((Named("apple"), "no such thing: apple"), (Fixed(), "always this")):
        here = travel(error, monkeypatch)  # which looks for the traceback
        assert isinstance(here, type(error)) and str(here) == text
    for error in (KeyError("apple"), Stripped("a text\n")):
        assert not hasattr(travel(error, monkeypatch), "__notes__")


def test_a_note_on_a_copy_is_none_on_the_other() -> None:
    error = ValueError("x")
    error.add_note("from there")
    copies = [exceptions.another(error) for _ in range(2)]
    copies[0].add_note("from here")
    assert copies[1].__notes__ == error.__notes__ == ["from there"]


def test_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    error = travel(Cannot(7, "here"), monkeypatch)
    assert type(error) is Cannot
    assert "Original exception on remote side was" in str(error) and "code 7" in str(error)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int
    text: str


class Immutable(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("immutable")


class NoNotes(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)

    def add_note(self, note: str) -> None:
        raise KeyError("no notes")


class NoArgs(Exception):
    @property
    def args(self) -> Any:
        raise LookupError("no args")

    @args.setter
    def args(self, value: Any) -> None:
        raise LookupError("no args")


@pytest.mark.parametrize(
    "error", [Frozen(7, "x"), Immutable("x"), NoNotes(7, "x"), NoArgs("x")], ids=repr
)
def test_a_class_that_refuses_what_is_done_to_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = travel(error, monkeypatch)
    assert isinstance(made, type(error)), repr(made)
    assert vars(made).items() >= vars(error).items()
    also = exceptions.also_runtime_error(made)
    assert isinstance(also, RuntimeError) and isinstance(also, type(error))
    group = travel(ExceptionGroup("both", [error, KeyError("a")]), monkeypatch)
    assert isinstance(group, ExceptionGroup)
    assert [type(one) for one in group.exceptions] == [type(error), KeyError]


class Registered(Exception):
    classes: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls) -> None:
        if Registered.classes.setdefault(cls.__name__, cls) is not cls:
            raise ValueError(f"two classes {cls.__name__}")


class NotFound(Registered):
    pass


def test_no_class_of_a_registry_is_derived_from(monkeypatch: pytest.MonkeyPatch) -> None:
    error = exceptions.also_runtime_error(travel(NotFound("x"), monkeypatch))
    assert type(error) is NotFound and Registered.classes == {"NotFound": NotFound}


def test_another_error_of_the_derived_class_can_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    also = exceptions.also_runtime_error(travel(Coded("x", 7), monkeypatch))
    again: Any = type(also)("y", 8)
    copy = pickle.loads(pickle.dumps(again))
    assert type(copy) is Coded and copy.code == 8 and copy.args == again.args


def test_unpicklable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(travel(Unpicklable("x"), monkeypatch)) is Unpicklable


def test_fields_of_builtin_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        open("/no such/file")  # noqa: SIM115
    error: Any = travel(raised.value, monkeypatch)
    assert type(error) is FileNotFoundError
    assert (error.errno, error.strerror) == (errno.ENOENT, os.strerror(errno.ENOENT))
    assert (error.filename, error.filename2) == ("/no such/file", None)
    assert str(error) == str(raised.value)
    error = travel(OSError(errno.EXDEV, "across", "from", None, "to"), monkeypatch)
    assert (error.errno, error.filename, error.filename2) == (errno.EXDEV, "from", "to")
    assert "only a text" in str(travel(OSError("only a text"), monkeypatch))
    error = travel(Disk(errno.EIO, "broken", 3), monkeypatch)
    assert type(error) is Disk and (error.errno, error.sector) == (errno.EIO, 3)

    error = travel(ImportError("no such", name="n", path="p"), monkeypatch)
    assert (error.name, error.path) == ("n", "p")
    error = travel(UnicodeDecodeError("utf-8", b"ab", 1, 2, "why"), monkeypatch)
    assert (error.encoding, error.object, error.start, error.end) == ("utf-8", b"ab", 1, 2)
    assert "can't decode byte" in str(error) and error.reason == "why"
    error = travel(NameError("no x", name="x"), monkeypatch)
    assert error.name == "x"
    with pytest.raises(SyntaxError) as wrong:
        compile("a b", "file.py", "exec")
    error = travel(wrong.value, monkeypatch)
    assert (error.filename, error.lineno, error.text) == ("file.py", 1, "a b\n")


class AsFromPython312(ImportError):
    """Has the field that ImportError itself has in Python 3.12."""

    __slots__ = ("name_from",)


class Pickled:
    """Is pickled as an exception with a state."""

    def __init__(self, error: BaseException, **state: Any) -> None:
        self.reduced = type(error), error.args, state

    def __reduce__(self) -> Any:
        return self.reduced


def test_what_makes_a_traceback_import_a_module_stays_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From Python 3.12 on the text of such an ImportError imports the module `name`."""
    error: Any = AsFromPython312("no such", name="a_module")
    error.name_from = "x"
    parts = exception_parts.take_apart(error)
    assert set(parts.fields) == {"msg", "name"}
    # A peer that sends it nevertheless.
    forged = parts._replace(fields={**parts.fields, "name_from": pickle.dumps("x")})
    made: Any = exception_parts.put_together(forged)
    assert type(made) is AsFromPython312 and made.name == "a_module"
    assert not hasattr(made, "name_from")


@pytest.mark.parametrize(
    ("error", "name"), [(ImportError("no such"), "name_from"), (AttributeError("none"), "obj")]
)
def test_an_allow_list_leaves_out_what_a_traceback_looks_into(error: Exception, name: str) -> None:
    from torch_rpc_ext._security.allow_list import AllowList

    state = {"name": "a_module", name: "x"}
    pickled = pickle.dumps(Pickled(error, **state))
    made: Any = AllowList.of([], "worker0").unpickler(io.BytesIO(pickled)).load()
    assert type(made) is type(error) and made.name == "a_module"
    assert getattr(made, name, None) is None


def test_stop_iteration_keeps_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    error: Any = travel(StopIteration([1]), monkeypatch)
    assert type(error) is StopIteration and error.value == [1]


@pytest.mark.parametrize("cls", [KeywordOnly, Slotted, Made])
def test_constructors_that_cannot_be_called(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error: Any = travel(cls(code=7), monkeypatch)
    assert type(error) is cls and error.code == 7


def test_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ExceptionGroup("two", [KeywordOnly(code=1), OSError(errno.EIO, "x", "file")])
    error: Any = travel(ExceptionGroup("outer", [group, ValueError("v")]), monkeypatch)
    inner, value = error.exceptions
    assert (error.message, inner.message, value.args) == ("outer", "two", ("v",))
    assert inner.exceptions[0].code == 1 and inner.exceptions[1].filename == "file"


def test_a_class_that_is_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(KeyError):
        pass

    local: Any = Local("x")
    local.code = 7
    error: Any = travel(local, monkeypatch)
    assert type(error) is KeyError and error.code == 7 and "Local" in str(error)


def test_classes_that_this_worker_may_not_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an allow-list: the nearest base that may be made, with what may be read."""

    class Checks(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module != "builtins":
                raise RefusedError(f"{module}.{name}")
            return super().find_class(module, name)

    described = _described(Disk(errno.EIO, "broken", Plain("an argument")), monkeypatch)
    monkeypatch.setattr(exceptions.internal, "_unpickler", Checks)
    with pytest.raises(OSError) as raised:
        exceptions.handle_exception(described)
    assert type(raised.value) is OSError and raised.value.errno == errno.EIO
    assert raised.value.sector is None  # type: ignore[attr-defined]


def test_what_a_caller_catches() -> None:
    """It is a RuntimeError too, and can be pickled again, as what it was."""
    for error in (
        KeyError("key"),
        OSError(errno.ENOENT, "no such", "file"),
        ImportError("no", name="n"),
        KeywordOnly(code=3),
        StopIteration(4),
        ExceptionGroup("group", [ValueError("v")]),
        Slotted(code=5),
    ):
        error.add_note("a note")
        also: Any = exceptions.also_runtime_error(error)
        assert isinstance(also, RuntimeError) and isinstance(also, type(error)), also
        assert str(also) == str(error) and also.args == error.args
        for name in ("errno", "filename", "name", "code", "value", "exceptions"):
            assert getattr(also, name, None) == getattr(error, name, None), (error, name)
        if isinstance(error, KeywordOnly | Slotted):
            continue  # which pickle cannot make again anyway
        again = pickle.loads(pickle.dumps(also))
        assert type(again) is type(error) and str(again) == str(error)
        assert getattr(again, "__notes__", []) == ["a note"]
        assert getattr(copy.copy(also), "errno", None) == getattr(error, "errno", None)


def test_no_attribute_takes_the_place_of_a_method() -> None:
    for made, method in ((StopIteration(4), "add_note"), (Plain("x"), "with_traceback")):
        forged = exception_parts.take_apart(made)._replace(
            attributes={
                method: pickle.dumps(eval),
                "_remote_original": pickle.dumps(eval),
                "__array_interface__": pickle.dumps({}),
                "code": pickle.dumps(7),
            }
        )
        described = exceptions.internal.RemoteException("1", exceptions.RemoteType(tuple(forged)))
        error: Any = exceptions.built(described)
        assert error.code == 7
        assert method not in vars(error) and "__array_interface__" not in vars(error)
        assert type(error._remote_original) is type(made)


def test_only_a_description_is_built() -> None:
    class Forged:
        exception_type = staticmethod(eval)
        msg = "1"

    with pytest.raises(TypeError, match="described an error by a .*Forged"):
        exceptions.built(Forged())


def test_anything_else_passes() -> None:
    exceptions.handle_exception(3)

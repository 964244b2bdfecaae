"""Programs that name TENSORPIPE run on this package's agent if they are told to, and only then."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from tests.support import script
from tests.support.backend import needs_ucx
from tests.support.ports import free_port

# Three interpreters import torch in a run, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(400)
run = functools.partial(script.run, timeout=350)
TUTORIAL = str(Path(__file__).with_name("tutorial.py"))
OPT_IN = {"TORCH_RPC_BACKEND": "ucx"}
#: Ways in which a program names its back end. Each run imports torch three times, so one variant
#: stands for all.
HOW = [
    "options",
    *(pytest.param(how, marks=pytest.mark.rare) for how in ("explicit", "nothing")),
]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nnodes=1",
    "--nproc-per-node=2",
]


def store() -> dict[str, str]:
    """Where a tutorial without torchrun puts its store."""
    return {"MASTER_PORT": str(free_port())}


def agent_of(ended: script.Ended) -> str:
    """The class of the agent: the last line that the tutorial prints."""
    assert ended.code == 0, ended
    return ended.out.strip().splitlines()[-1]


@pytest.mark.parametrize("how", HOW)
def test_without_the_opt_in_nothing_changes(how: str) -> None:
    assert agent_of(run([sys.executable, TUTORIAL, how], store())) == "TensorPipeAgent"


@needs_ucx("is what is taken over")
@pytest.mark.parametrize("how", HOW)
def test_environment_variable(how: str) -> None:
    assert "Ucx" in agent_of(run([sys.executable, TUTORIAL, how], OPT_IN | store()))


@needs_ucx("is what is taken over")
@pytest.mark.parametrize("how", HOW)
def test_run_command(how: str) -> None:
    assert "Ucx" in agent_of(
        run([sys.executable, "-m", "torch_rpc_ext", "run", TUTORIAL, how], store())
    )


@needs_ucx("is what is taken over")
def test_run_command_passes_arguments_and_exit_codes(tmp_path: Path) -> None:
    path = script.write(
        tmp_path, "args.py", "import sys; print(sys.argv[1:], __name__); sys.exit(3)"
    )
    ended = run([sys.executable, "-m", "torch_rpc_ext", "run", path, "--flag", "a b", "-x"])
    assert (ended.code, ended.out.strip()) == (3, "['--flag', 'a b', '-x'] __main__"), ended


@needs_ucx("is what is taken over")
def test_run_command_with_torchrun_options() -> None:
    command = [
        sys.executable,
        "-m",
        "torch_rpc_ext",
        "run",
        "--standalone",
        "--nproc-per-node=2",
        TUTORIAL,
    ]
    assert "Ucx" in agent_of(run(command))


@needs_ucx("is what is taken over")
def test_torchrun_ranks() -> None:
    assert "Ucx" in agent_of(run([*TORCHRUN, TUTORIAL], OPT_IN))


TAKE_OVER = """
    import torch.distributed.rpc as rpc
    import torch_rpc_ext
    from tests.support.ports import free_port

    torch_rpc_ext.take_over()
    torch_rpc_ext.take_over()  # a second time does no harm
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{free_port()}",
        _transports=["shm", "uv"],
        _channels=["basic"],
        device_maps={},
    )
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    print(rpc.rpc_sync("me", max, args=(1, 2)))
    print(torch_rpc_ext.info())
    rpc.shutdown()
"""


@needs_ucx("is what is taken over")
def test_take_over_function_and_info() -> None:
    ended = script.python(TAKE_OVER)
    assert ended.code == 0 and ended.out.startswith("2\n"), ended
    assert "ucx" in ended.out.lower(), ended


@needs_ucx("has nothing registered beside it")
def test_both_back_ends_side_by_side_in_one_program() -> None:
    code = """
    import tempfile
    import torch.distributed.rpc as rpc
    import torch_rpc_ext
    for backend, options in (
        (rpc.BackendType.UCX, torch_rpc_ext.UcxRpcBackendOptions),
        (rpc.BackendType.TENSORPIPE, rpc.TensorPipeRpcBackendOptions),
        (None, torch_rpc_ext.UcxRpcBackendOptions),
        (None, rpc.TensorPipeRpcBackendOptions),
    ):
        path = tempfile.mktemp()
        rpc.init_rpc("me", backend=backend, rank=0, world_size=1,
                     rpc_backend_options=options(init_method=f"file://{path}"))
        print(type(rpc.api._get_current_rpc_agent()).__name__)
        rpc.shutdown()
    """
    ended = script.python(code)
    assert ended.code == 0, ended
    names = ended.out.split()
    assert ["Ucx" in name for name in names] == [True, False, True, False], names


@needs_ucx("needs no entry point")
def test_a_backend_name_that_is_not_ours_is_refused() -> None:
    code = "from torch.distributed import rpc; rpc.init_rpc('me', rank=0, world_size=1)"
    ended = script.python(code, env={"TORCH_RPC_BACKEND": "ucxx"} | store())
    assert ended.code != 0 and "TORCH_RPC_BACKEND" in ended.err and "ucxx" in ended.err, ended

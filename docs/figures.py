"""The figures of the design notes and of the notebooks. docs/generate.py draws them.

FIGURES are the design notes'. Their sequences name each message as the code does:
tests/process/test_design_notes.py runs what each sequence shows, listens to the sockets, and
compares. PICTURES are the notebooks': who calls whom, by the names of the notebook's functions.
"""

from __future__ import annotations

from drawing import Boxes, Cell, Diagram, Message, Note

_CALLER, _OWNER, _OTHER = "worker0", "worker1", "worker2"

RREF_LIFE = Diagram(
    "Life of an RRef that worker0 makes on worker1",
    {_CALLER: "worker0 (user)", _OWNER: "worker1 (owner)"},
    (
        Note(_CALLER, ("rref = rpc.remote(...)", "draws RRefId and ForkId")),
        Message(_CALLER, _OWNER, "PYTHON_REMOTE_CALL", "function, both ids"),
        Note(_OWNER, ("keeps the OwnerRRef,", "fork of worker0 is known;", "runs the function")),
        Message(_OWNER, _CALLER, "REMOTE_RET", "the user is confirmed"),
        Note(_CALLER, ("rref.to_here()",)),
        Message(_CALLER, _OWNER, "PYTHON_RREF_FETCH_CALL", "waits there for the value"),
        Message(_OWNER, _CALLER, "PYTHON_RREF_FETCH_RET", "a copy"),
        Note(_CALLER, ("del rref",)),
        Message(_CALLER, _OWNER, "RREF_USER_DELETE"),
        Note(_OWNER, ("no fork left:", "the value goes")),
        Message(_OWNER, _CALLER, "RREF_ACK"),
    ),
)

RREF_SHARE = Diagram(
    "worker0 passes its RRef to worker2; the value is on worker1",
    {_CALLER: "worker0 (parent)", _OTHER: "worker2 (child)", _OWNER: "worker1 (owner)"},
    (
        Note(_CALLER, ("pickles the RRef: it must", "outlive the child's request")),
        Message(_CALLER, _OTHER, "PYTHON_CALL"),
        Message(_OTHER, _OWNER, "RREF_FORK_REQUEST"),
        Message(_OWNER, _OTHER, "RREF_ACK", "the fork is known"),
        Note(_OTHER, ("now the function may run;", "meanwhile the parent is told")),
        Message(_OTHER, _CALLER, "RREF_CHILD_ACCEPT"),
        Message(_CALLER, _OTHER, "RREF_ACK", "free to be deleted"),
        Note(_OTHER, ("rref.to_here()",)),
        Message(_OTHER, _OWNER, "PYTHON_RREF_FETCH_CALL"),
        Message(_OWNER, _OTHER, "PYTHON_RREF_FETCH_RET"),
        Message(_OTHER, _CALLER, "PYTHON_RET"),
        Message(_OTHER, _OWNER, "RREF_USER_DELETE", "the argument is gone"),
        Message(_OWNER, _OTHER, "RREF_ACK"),
    ),
)

RREF_HOME = Diagram(
    "worker0 passes its RRef to the owner, worker1",
    {_CALLER: "worker0 (parent)", _OWNER: "worker1 (owner)"},
    (
        Message(_CALLER, _OWNER, "PYTHON_CALL"),
        Note(_OWNER, ("unpickles it as the", "OwnerRRef: no fork")),
        Message(_OWNER, _CALLER, "RREF_CHILD_ACCEPT"),
        Message(_CALLER, _OWNER, "RREF_ACK"),
        Message(_OWNER, _CALLER, "PYTHON_RET"),
    ),
)

AUTOGRAD = Diagram(
    "One remote call in a distributed autograd context, its backward pass, and the end",
    {_CALLER: "worker0", _OWNER: "worker1"},
    (
        Note(_CALLER, ("with dist_autograd.context():", "y = rpc_sync(worker1, f, x)")),
        Message(_CALLER, _OWNER, "FORWARD_AUTOGRAD_REQ", "x; send 0 here, recv 0 there"),
        Message(_OWNER, _CALLER, "FORWARD_AUTOGRAD_RESP", "f(x); send 1 there, recv 1 here"),
        Note(_CALLER, ("backward(context, [y.sum()])", "reaches recv 1")),
        Message(_CALLER, _OWNER, "BACKWARD_AUTOGRAD_REQ", "gradient of f(x)"),
        Note(_OWNER, ("send 1 starts the engine;", "it reaches recv 0")),
        Message(_OWNER, _CALLER, "BACKWARD_AUTOGRAD_REQ", "gradient of x"),
        Message(_CALLER, _OWNER, "BACKWARD_AUTOGRAD_RESP"),
        Message(_OWNER, _CALLER, "BACKWARD_AUTOGRAD_RESP", "then backward() returns"),
        Note(_CALLER, ("the with block ends",)),
        Message(_CALLER, _OWNER, "CLEANUP_AUTOGRAD_CONTEXT_REQ"),
        Message(_OWNER, _CALLER, "CLEANUP_AUTOGRAD_CONTEXT_RESP", "ends it here once more"),
    ),
)

HANDSHAKE = Diagram(
    "A connection opens with its first call",
    {_CALLER: "worker0 (opens)", _OWNER: "worker1 (accepts)"},
    (
        Note(_CALLER, ("address and door token", "of worker1 from the store")),
        Message(_CALLER, _OWNER, "kOpen", "preamble P1, proof 1"),
        Note(_OWNER, ("proof 1 right? else dropped;", "makes P2, tells nobody yet")),
        Message(_OWNER, _CALLER, "kOpened", "preamble P2, proof 2"),
        Note(_CALLER, ("proof 2 right?", "the same group?")),
        Message(_CALLER, _OWNER, "kConfirm", "proof 3"),
        Message(_CALLER, _OWNER, "kFrame", "the first call, with it"),
        Note(_OWNER, ("proof 3 right? the same group?", "the agent learns of the peer")),
        Message(_OWNER, _CALLER, "kFrame", "the answer"),
    ),
)

BULK_LENT = Diagram(
    "An argument of 4 MB within a host, and its answer",
    {_CALLER: "worker0 (caller)", _OWNER: "worker1 (callee)"},
    (
        Note(_CALLER, ("copies the tensor into a block", "that is a sealed memfd")),
        Message(_CALLER, _OWNER, "kFrame", "head; region and fd of the block"),
        Note(
            _OWNER,
            ("opens /proc/<pid>/fd/<fd>,", "checks the seals, maps it;", "runs the function"),
        ),
        Message(_OWNER, _CALLER, "kFrame", "answer; the block is free again"),
    ),
)

BULK_PULL = Diagram(
    "An argument of 4 MB between hosts, and its answer",
    {_CALLER: "worker0 (caller)", _OWNER: "worker1 (callee)"},
    (
        Message(_CALLER, _OWNER, "kFrame", "head; size of the tensor"),
        Note(_OWNER, ("takes a receive buffer,", "posts tagged receives of 16 MiB")),
        Message(_OWNER, _CALLER, "kPull", "first tag"),
        Note(_CALLER, ("sends the chunks, tagged,", "over the second UCX worker")),
        Message(_OWNER, _CALLER, "kFrame", "answer; the tensor is free again"),
    ),
)

HANDOVER = Diagram(
    "An argument of 4 MB that is returned, within a host",
    {_CALLER: "worker0 (caller)", _OWNER: "worker1 (callee)"},
    (
        Message(_CALLER, _OWNER, "kFrame", "call; region and fd of a block"),
        Note(_OWNER, ("maps it; returns it;", "nobody else refers to it")),
        Message(_OWNER, _CALLER, "kFrame", "answer; the same region"),
        Note(_CALLER, ("finds it among what it has", "lent here: no copy, no map")),
        Message(_OWNER, _CALLER, "kDone", "adopted: worker0 may end"),
        Message(_CALLER, _OWNER, "kDone", "answer taken"),
        Message(_OWNER, _CALLER, "kDone", "the block is not mapped any more"),
        Note(_CALLER, ("the last tensor on it dies:", "the block is free again")),
    ),
)

FRAME = Boxes(
    "A call frame",
    (
        (
            "header, 44 bytes",
            (
                Cell("magic 2", 2.2),
                Cell("ver 1", 1.5),
                Cell("kind 1", 1.7),
                Cell("type 2", 1.8),
                Cell("options 2", 1.7),
                Cell("flags 4", 2),
            ),
        ),
        ("", (Cell("tensors 4", 1.6), Cell("call id 8", 2), Cell("payload bytes 8", 2.4))),
        ("", (Cell("storages S 4"), Cell("records R 4"), Cell("time-out 4"))),
        (
            "then",
            (
                Cell("storage table 8 S", 2, strong=True),
                Cell("tensor table, R records", 2.4, strong=True),
            ),
        ),
        ("", (Cell("payload (upstream's pickle)", strong=True), Cell("small storages"))),
        ("outside of the frame", (Cell("bulk: storages above 16 KiB, payloads likewise"),)),
    ),
)

LAYERS = Boxes(
    "The layers, from Python down",
    (
        ("", (Cell("torch.distributed.rpc: pickles, RRefs, autograd (upstream)"),)),
        ("", (Cell("bindings: pybind11"), Cell("compat: reaches into torch"))),
        ("", (Cell("agent: calls, peers, threads, shutdown", strong=True),)),
        ("", (Cell("transport: ucx"), Cell("loopback"), Cell("fault"))),
        ("", (Cell("wire: call frame"), Cell("crypto"), Cell("metrics"), Cell("memory"))),
        ("", (Cell("base: errors, bounded reader, Poller, log"),)),
    ),
)

_AGENT, _OBSERVERS = "agent", ("observer0", "observer1")

OBSERVERS = Diagram(
    "One agent and two observers: an iteration",
    {"notebook": "notebook", _AGENT: _AGENT, **{name: name for name in _OBSERVERS}},
    (
        Message("notebook", _AGENT, "iterate"),
        *(Message(_AGENT, name, "observe", "an RRef to the agent") for name in _OBSERVERS),
        Message(_OBSERVERS[0], _AGENT, "act", "what it has seen"),
        Note(_AGENT, ("one of two has asked:", "act returns a future")),
        Message(_OBSERVERS[1], _AGENT, "act", "what it has seen"),
        Note(_AGENT, ("all have asked: runs the", "network once, sets the future")),
        *(Message(_AGENT, name, "actions", "answer to act") for name in _OBSERVERS),
        Note(_OBSERVERS[0], ("both step their games and", "ask again: 64 times in all")),
        *(Message(name, _AGENT, "seen", "answer to observe") for name in _OBSERVERS),
        Note(_AGENT, ("learns from all steps",)),
        Message(_AGENT, "notebook", "rewards", "answer to iterate"),
    ),
)

_SERVER, _TRAINERS = "server", ("trainer0", "trainer1")
_WITH_SERVER = {_TRAINERS[0]: _TRAINERS[0], _SERVER: _SERVER, _TRAINERS[1]: _TRAINERS[1]}

SYNCHRONOUS = Diagram(
    "Synchronous: two trainers, one step of the weights",
    _WITH_SERVER,
    (
        Message(_TRAINERS[0], _SERVER, "update_together", "its gradient"),
        Note(_SERVER, ("one of two gradients:", "returns a future, no thread waits")),
        Message(_TRAINERS[1], _SERVER, "update_together", "its gradient"),
        Note(_SERVER, ("both are here: a step with", "their mean, sets the future")),
        *(Message(_SERVER, name, "weights", "the same for both") for name in _TRAINERS),
    ),
)

ASYNCHRONOUS = Diagram(
    "Asynchronous: two trainers, a step for each gradient",
    _WITH_SERVER,
    (
        Message(_TRAINERS[0], _SERVER, "update_now", "its gradient"),
        Note(_SERVER, ("a step at once",)),
        Message(_SERVER, _TRAINERS[0], "weights", "after one step"),
        Message(_TRAINERS[1], _SERVER, "update_now", "a gradient of the old weights"),
        Note(_SERVER, ("a step at once",)),
        Message(_SERVER, _TRAINERS[1], "weights", "after two steps"),
    ),
)

_STAGES = ("stage0", "stage1", "stage2")

PIPELINE = Diagram(
    "A batch through three stages; one of its micro-batches",
    {"notebook": "notebook", **{name: name for name in _STAGES}},
    (
        Message("notebook", _STAGES[0], "forward_backward", "the inputs"),
        Message("notebook", _STAGES[1], "forward_backward"),
        Message("notebook", _STAGES[2], "forward_backward", "the targets"),
        Note(_STAGES[0], ("forward",)),
        Message(_STAGES[0], _STAGES[1], "activations"),
        Note(_STAGES[1], ("forward",)),
        Message(_STAGES[1], _STAGES[2], "activations"),
        Note(_STAGES[2], ("forward, loss,", "backward")),
        Message(_STAGES[2], _STAGES[1], "gradients"),
        Note(_STAGES[1], ("backward",)),
        Message(_STAGES[1], _STAGES[0], "gradients"),
        Note(_STAGES[0], ("backward",)),
        Message(_STAGES[2], "notebook", "loss", "answer, after the last micro-batch"),
        Message(_STAGES[1], "notebook", "stats", "answer"),
        Message(_STAGES[0], "notebook", "stats", "answer"),
    ),
)

# The number of the notebook comes first; the pictures of a notebook are in its order.
PICTURES: dict[str, Diagram] = {
    "02_agent_and_observers": OBSERVERS,
    "04_synchronous": SYNCHRONOUS,
    "04_asynchronous": ASYNCHRONOUS,
    "07_pipeline": PIPELINE,
}

FIGURES: dict[str, Diagram | Boxes] = {
    "rref-life": RREF_LIFE,
    "rref-share": RREF_SHARE,
    "rref-home": RREF_HOME,
    "autograd": AUTOGRAD,
    "handshake": HANDSHAKE,
    "bulk-lent": BULK_LENT,
    "bulk-pull": BULK_PULL,
    "handover": HANDOVER,
    "frame": FRAME,
    "layers": LAYERS,
}

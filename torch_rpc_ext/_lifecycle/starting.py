"""Starting the agent: from init_rpc's arguments to a running session."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import _distributed_rpc as _untyped_native_rpc
from torch._C._distributed_c10d import Store
from torch.distributed import rpc as _untyped_rpc
from torch.distributed.rpc import api as _untyped_api

from torch_rpc_ext import events
from torch_rpc_ext._base.environment import check_log_level
from torch_rpc_ext._base.option_checks import (
    DEFAULT_RPC_TIMEOUT,
    ENCRYPTION,
    effective_init_timeout,
    wire_dtype_number,
)
from torch_rpc_ext._group import (
    descriptors,
    dynamic,
    interfaces,
    ports,
    rendezvous,
    returning,
    sessions,
    store_opening,
    stores,
)
from torch_rpc_ext._group.members import Member, device_tables, host_identity, prepare_devices
from torch_rpc_ext._lifecycle import lifetime
from torch_rpc_ext._native import loader
from torch_rpc_ext._security import group_secret
from torch_rpc_ext._upstream import hooks, tensorpipe, torch_names
from torch_rpc_ext.options import UcxRpcBackendOptions, of_agent

# Upstream's functions have no types.
api: Any = _untyped_api
rpc: Any = _untyped_rpc
native_rpc: Any = _untyped_native_rpc


def prepare(rank: int, world_size: int | None, options: Any) -> None:
    """Do everything that may fail and needs no store, before init_rpc opens the store.

    Args:
        rank: of this worker; -1 where the store's URL or the environment holds the rank.
        world_size, options: as given to init_rpc.

    Raises:
        ImportError: the extension or UCX cannot be loaded; the text says what to do.
        ValueError: the rank is out of range, an environment variable is wrong, or the store's URL
            is, or its file cannot be made.
    """
    check_log_level()
    if rank != -1:
        _check_rank(rank, world_size)
    store_opening.check_url("env://" if options is None else options.init_method)
    native = loader.load()
    if rpc._init_counter > 0 and not native_rpc._is_current_rpc_agent_set():
        # Upstream's C++ remembers the first rank of the process for ever (pytorch issue 46491).
        native.prepare_reinit()


def _check_rank(rank: int, world_size: int | None) -> None:
    if world_size is not None and world_size < 0:
        raise ValueError(
            f"world_size must be positive, or None for a dynamic group, got {world_size}"
        )
    if rank < 0 or (world_size and rank >= world_size):
        allowed = f"from 0 to {world_size - 1} (world_size - 1)" if world_size else "0 or more"
        raise ValueError(f"rank must be {allowed}, got {rank}")


def init_timeout(options: Any) -> float:
    """Return how long init_rpc waits for the others, s; takes TENSORPIPE's options and ours."""
    if isinstance(options, UcxRpcBackendOptions):
        return options.effective_init_timeout()
    return effective_init_timeout(
        0, DEFAULT_RPC_TIMEOUT if options is None else options.rpc_timeout
    )


def start(
    *,
    store: Any,
    name: str,
    rank: int,
    world_size: int | None,
    options: UcxRpcBackendOptions,
    given_options: Any,
    numbered: bool,
) -> Any:
    """Start the agent and meet the other workers.

    Args:
        store: torch.distributed store of the group.
        name: this worker's name.
        rank: this worker's rank.
        world_size: number of workers; None or 0 for a dynamic group.
        options: the options in force.
        given_options: the options that the user passed, of upstream's class under takeover.
        numbered: whether the store has the prefix of init_rpc, the number of its calls.

    Returns:
        The agent, running and current.

    Raises:
        TypeError, ValueError: an argument is wrong.
        RpcError: the workers did not come together; the text says who is missing, or why.
        ImportError: the extension or UCX cannot be loaded.
    """
    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    _check_rank(rank, world_size)
    rank = int(rank)
    native = loader.load()
    _attach(native)
    seconds = options.effective_init_timeout()
    own = stores.Answering(stores.unnumbered(store) if numbered else store, seconds)

    def open_session() -> sessions.Session:
        return _open(native, store, name, rank, world_size, options, given_options)

    with own, stores.patient(store, seconds):
        given = own.of(store)
        meeting = rendezvous.Rendezvous(own, name, rank, world_size or 0, seconds, given)
        place = returning.Place(own, rank)
        rendezvous.claim_kind(given, is_static=bool(world_size))
        session = None
        standing = returning.find(place, name, rank, world_size) if world_size else None
        if standing is not None:
            session = _start_again(open_session, place, standing)
            if session is not None:
                return session.agent
        try:
            session = open_session()
            if world_size:
                _start_static(session, meeting, place)
            else:
                _start_dynamic(session, own)
        except BaseException as problem:
            # Also at KeyboardInterrupt nothing of a failed start may stay.
            if world_size:
                meeting.fail(problem)
            if session is not None:
                lifetime.abandon(session)
            raise
    return session.agent


def _open(
    native: Any,
    store: Any,
    name: str,
    rank: int,
    world_size: int | None,
    options: UcxRpcBackendOptions,
    given_options: Any,
) -> sessions.Session:
    """Create the agent, which listens from then on, and the session."""
    descriptors.require()
    interface = interfaces.choose(options.interface, options.init_method)
    agent_options = native.AgentOptions()
    agent_options.set_values(of_agent(options))
    agent_options.set_interfaces(
        list(interface.names),
        explicit=bool(options.interface),
        prefer_ipv6=interface.prefer_ipv6,
    )
    agent_options.set_encryption(ENCRYPTION.index(options.encryption))
    agent_options.set_wire_dtypes(*_wire_dtypes(options))
    allowed = None
    if options.allow_list is not None:
        torch_names.require("the option allow_list")
        from torch_rpc_ext._security.allow_list import AllowList  # not loaded without the option

        allowed = AllowList.of(options.allow_list, name, SERVED)
        agent_options.allow_only(allowed.names, allowed.modules)
    agent = ports.when_free(
        lambda: native.UcxAgent(agent_options, name, rank, bool(world_size)),
        options.port_range,
        options.effective_init_timeout(),
    )
    me = Member(
        name=name,
        rank=rank,
        address=bytes(agent.address),
        world_size=world_size or None,
        device_count=torch.cuda.device_count(),
        device_maps=options.device_maps,
        devices=options.devices,
        wire=int(native.WIRE_VERSION),
        incarnation=secrets.token_hex(8),
        host=host_identity(),
        pid=os.getpid(),
        secret=group_secret.fingerprint(group_secret.own(options)),
    )
    session = sessions.Session(agent, me, options, given_options, store, interface, allowed)
    lifetime.open_session(session)
    return session


def _wire_dtypes(options: UcxRpcBackendOptions) -> tuple[int, dict[str, int]]:
    """Return (number of the dtype for all workers, worker -> number for those that differ)."""
    given = options.wire_dtype
    if not isinstance(given, dict):
        return wire_dtype_number("wire_dtype", given), {}
    return 0, {worker: wire_dtype_number("wire_dtype", each) for worker, each in given.items()}


def _check_workers(options: UcxRpcBackendOptions, members: Iterable[str]) -> None:
    """Raise for options that name workers which a static group does not have."""
    known = sorted(members)
    for worker in options.wire_dtype if isinstance(options.wire_dtype, dict) else ():
        if worker not in known:
            raise ValueError(
                f"wire_dtype has an entry for worker {worker!r}, which is not in the group: it has "
                f"{', '.join(map(repr, known))}"
            )


def _start_static(
    session: sessions.Session, meeting: rendezvous.Rendezvous, place: returning.Place
) -> None:
    session.place = place
    group = meeting.join(session.me)
    _check_workers(session.options, group.members)
    _enter(session, group)
    api._init_rpc_states(session.agent)
    meeting.confirm_start()
    place.take(group.id, session.me)


def _start_again(
    open_session: Callable[[], sessions.Session],
    place: returning.Place,
    standing: returning.Standing,
) -> sessions.Session | None:
    """Come back to the static group that this worker was in before it died; None if it is gone."""
    session = open_session()
    try:
        session.place = place
        group = returning.with_new_life(place, standing, session.me)
        if group is not None:
            _enter(session, group)
            api._init_rpc_states(session.agent)
            if returning.come_back(session, standing):
                place.take(group.id, session.me)
                return session
    except BaseException:
        lifetime.abandon(session)
        raise
    lifetime.abandon(session)
    return None


def _start_dynamic(session: sessions.Session, store: Any) -> None:
    session.directory = dynamic.Directory(store)
    try:
        _enter(session, session.directory.join(session.me, secrets.token_bytes(16)))
        api._init_rpc_states(session.agent)
        events.follow_members(session)
        dynamic.announce_join(session)
    except BaseException:
        # Others may have noted this worker already, and keep it until they hear that it left.
        dynamic.leave_group(session)
        raise


def _enter(session: sessions.Session, group: rendezvous.Group) -> None:
    """Give the agent its group."""
    with session.lock:
        session.members = dict(group.members)
        session.me = group.members[session.me.name]
        rows = [member.row() for member in group.members.values()]
        session.agent.set_group(group.id, rows, group_secret.own(session.options) or group.secret)
        reverse, devices = device_tables(session.me, session.members)
        prepare_devices(devices)
        session.agent.set_device_maps(session.me.device_maps, reverse, devices)


# Functions that workers call on each other, whatever the option allow_list says.
SERVED = (
    dynamic.member_joined,
    dynamic.member_left,
    returning.may_return,
    returning.member_returned,
)


def _session_of(agent: Any) -> sessions.Session | None:
    """Return the session if it is this agent's: a forked child, and a late call, get None."""
    session = sessions.current()
    # By rank, because pybind11 may make a new Python object for the same agent.
    mine = session is not None and session.me.rank == agent.get_worker_info().id
    return session if mine else None


@functools.cache
def _attach(native: Any) -> None:
    """Give the C++ agent class the methods that upstream's Python calls, once."""
    agent_class = native.UcxAgent
    native_shutdown, native_stop = agent_class.shutdown, agent_class.stop

    def stop(self: Any) -> None:
        """Say goodbye to the others, and serve no more requests."""
        try:
            session = _session_of(self)
            if session is not None:
                dynamic.leave_quietly(session)
        finally:  # also after Ctrl-C: upstream's RRefs end next, while nothing may use them
            native_stop(self)

    def shutdown(self: Any) -> None:
        """Stop the agent; see torch.distributed.rpc.shutdown."""
        try:
            with hooks.one_at_a_time():
                native_shutdown(self)
        finally:
            if _session_of(self) is not None:
                lifetime.close_session()

    agent_class.stop = stop
    agent_class.shutdown = shutdown
    agent_class._update_group_membership = dynamic.update_group_membership
    agent_class._get_backend_options = lambda _: sessions.require().given_options
    agent_class.store = property(lambda _: sessions.require().store)

    tensorpipe.adopt_agent_class(agent_class)

"""Runs kernels as machine code on this CPU: compiles the LLVM code that numba-cuda passes to NVVM
for the host instead.

The simulator runs the kernels as Python code, whose integers do not overflow, and with memory
functions of its own. This file tests what the simulator does not: the types that numba infers, its
constants, and the instructions of memory_gpu.py. It cannot test what NVVM and a GPU do with the
same
code: memory order, caches, real threads.

This file contains all uses of numba-cuda's private parts; the tests that use it check them.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import llvmlite.binding as llvm
from numba.cuda import compiler, types

from torch_rpc_ext.kernels.registry import Kernel

#: The special registers that a thread reads. Grids have one dimension, so in the others an index is
#: 0 and a size is 1.
_REGISTERS = ("tid", "ntid", "ctaid", "nctaid")
# Pointers, after addrspace(n) was removed. Since version 15, LLVM's pointers have no pointee types.
_POINTER = re.compile(r"(?:i\d+|<\d+ x i\d+>|\[\d+ x i\d+\]|\{[^{}]*\}|ptr)\*")


class NativeKernel:
    """A kernel as a function of the host.

    Args:
        kernel: from the registry. If its threads wait for each other, blocks must have one thread.
    """

    def __init__(self, kernel: Kernel) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine()
        texts = _llvm_code(kernel)
        entry = re.findall(r'^define void @"([^"]+)"', texts[0], re.MULTILINE)[0]
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_registers()), machine)
        for text in dict.fromkeys(texts):
            self._engine.add_module(llvm.parse_assembly(_for_host(text)))
        self._engine.finalize_object()
        self._function: Any = ctypes.CFUNCTYPE(
            None, *[ctypes.c_int64] * sum(count for _, count in kernel.arguments)
        )(self._engine.get_function_address(entry))

    def launch(self, blocks: int, threads: int, *arguments: Any, first_block: int = 0) -> None:
        """Run all threads of the blocks from `first_block` on, one after the other."""
        flat = []
        for argument in arguments:
            flat.extend(argument if isinstance(argument, tuple) else (argument,))
        self._set("ntid", threads)
        self._set("nctaid", blocks)
        for block in range(first_block, blocks):
            self._set("ctaid", block)
            for thread in range(threads):
                self._set("tid", thread)
                self._function(*flat)

    def _set(self, register: str, value: int) -> None:
        address = self._engine.get_global_value_address(f"{register}.value")
        ctypes.c_int32.from_address(address).value = value


def _llvm_code(kernel: Kernel) -> list[str]:
    signature = tuple(
        types.int64 if count == 1 else types.UniTuple(types.int64, count)
        for _, count in kernel.arguments
    )
    library, _ = compiler._compile_pyfunc_with_fixup(
        kernel.function, signature, device=False, abi="numba", cc=(9, 0)
    )
    return list(library.llvm_strs)


def _registers() -> str:
    lines = ["define void @host_barrier() { ret void }"]
    for name in _REGISTERS:
        lines.append(f"@{name}.value = global i32 0")
        lines.append(
            f"define i32 @host_{name}_x() {{ %v = load i32, ptr @{name}.value ret i32 %v }}"
        )
        for other in "yz":
            value = int(name.startswith("n"))
            lines.append(f"define i32 @host_{name}_{other}() {{ ret i32 {value} }}")
    return "\n".join(lines)


def _for_host(text: str) -> str:
    text = re.sub(r"(?m)^target .*$|^@\"llvm.used\".*$", "", text)
    text = re.sub(r" ?addrspace\(\d\)", "", text)
    text = text.replace(" addrspacecast ", " bitcast ").replace(
        "llvm.nvvm.barrier0", "host_barrier"
    )
    text = re.sub(r"llvm\.nvvm\.read\.ptx\.sreg\.(\w+)\.([xyz])", r"host_\1_\2", text)
    # Every numba function refers to a variable for its globals. Kernels do not use it.
    text = re.sub(r"(?m)^(@.*) = common global", r"\1 = linkonce_odr global", text)
    while _POINTER.search(text):
        text = _POINTER.sub("ptr", text)
    return text

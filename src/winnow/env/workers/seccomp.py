"""A system-call filter for the sandbox, as the BPF program that bubblewrap loads.

It is the second line of defence, for the gaps left by namespaces and dropped privileges. Denied calls fail with EPERM.
Linux on x86-64 and 64-bit ARM; numbers are those of the kernel's own tables.
"""

from __future__ import annotations

import platform
import struct

# (x86-64, arm64); None where the architecture does not have the call
DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Memory outside every limit of a process.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
}
SOCKET = (41, 198)
FAMILIES = (1, 2, 10)
"""Unix, IPv4, IPv6, all of the sandbox's own network namespace. Others, such as vsock, may not have namespaces."""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050001
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data."""
_X32 = 0x40000000


def program(machine: str | None = None) -> bytes:
    """Return the filter for this machine. Raises KeyError with the machine's name for other architectures."""
    column, architecture = _ARCHITECTURES[machine or platform.machine()]
    denied = [number for numbers in DENIED.values() if (number := numbers[column]) is not None]
    # Each line: code, jump if true, jump if false, operand. Jumps count the lines skipped.
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _EPERM),
    ]
    for number in denied:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    lines += [(_EQUAL, 0, len(FAMILIES) + 2, SOCKET[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    lines += [(_EQUAL, len(FAMILIES) - i, 0, family) for i, family in enumerate(FAMILIES)]
    lines += [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)

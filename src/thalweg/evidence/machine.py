"""What a result was measured on: versions and machine."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
from pathlib import Path

import psutil


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python, thalweg and those of its requirements that are installed."""
    found = {"python": platform.python_version()}
    for requirement in ["thalweg", *(importlib.metadata.requires("thalweg") or [])]:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def machine() -> dict[str, str | int | float]:
    """Return the system, the processor, its cores and the memory in GiB."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"

"""Files are replaced whole or not at all, and what a killed process leaves is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tinker_lightning.wire import folders

if TYPE_CHECKING:
    from pathlib import Path

# Replaces a file by one that is larger than the system allows, or in a folder that is read-only, or is killed.
FAULTS = """
import errno, os, resource, signal, sys
from pathlib import Path
from tinker_lightning.wire import folders

file = Path(sys.argv[1]) / "last.ckpt"
folders.replace_file(file, b"whole")
if sys.argv[2] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
elif sys.argv[2] == "read-only":
    file.parent.chmod(0o555)
    os.setuid(65534) if os.getuid() == 0 else None
else:
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
try:
    folders.replace_file(file, bytes(40_000))
except OSError as error:
    print(errno.errorcode[error.errno], error)
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX")
@pytest.mark.parametrize(("fault", "code"), [("full", "EFBIG"), ("read-only", "EACCES"), ("kill", "")])
def test_a_file_that_cannot_be_written_leaves_the_one_before(fault: str, code: str, tmp_path: Path) -> None:
    script = [sys.executable, "-c", FAULTS, str(tmp_path), fault]
    printed = subprocess.run(script, capture_output=True, text=True, check=False, timeout=300).stdout
    tmp_path.chmod(0o755)
    assert (tmp_path / "last.ckpt").read_bytes() == b"whole"
    if fault == "kill":
        assert len(os.listdir(tmp_path)) == 2
        folders.clear_parts(tmp_path)
    else:
        assert printed.startswith(f"{code} [Errno "), printed
        assert f"{tmp_path}/last.ckpt could not be written: " in printed
        assert "It needs 40,000 bytes" in printed
        assert ("are free. Make room, or choose another folder." in printed) == (fault == "full")
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_file_that_another_process_writes_is_not_removed(tmp_path: Path) -> None:
    _, descriptor = folders._new_part(tmp_path)
    folders.clear_parts(tmp_path)
    assert len(os.listdir(tmp_path)) == 1
    os.close(descriptor)
    folders.clear_parts(tmp_path)
    assert os.listdir(tmp_path) == []

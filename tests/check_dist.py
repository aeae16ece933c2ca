"""Checks the files that `python -m build` made, and an installation. Run by `tox run -e build`.

python tests/check_dist.py DIRECTORY     a wheel and an sdist in it
python tests/check_dist.py --installed   the distribution in this environment
"""

import email
import importlib.metadata
import pathlib
import sys
import tarfile
import zipfile

ENTRY = "fsdp_skip1 = _fsdp_skip1_autoload:autoload"
MODULES = {
    "_fsdp_skip1_autoload.py",
    "fsdp_skip1/__init__.py",
    "fsdp_skip1/activation.py",
    "fsdp_skip1/py.typed",
}


def expect(condition, message):
    if not condition:
        raise SystemExit(f"check_dist: {message}")


def check_wheel(path):
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entries = archive.read(f"{info}/entry_points.txt").decode()
    expect(names >= MODULES, f"wheel lacks {sorted(MODULES - names)}")
    tops = {name.partition("/")[0] for name in names}
    expect(tops == {"fsdp_skip1", "_fsdp_skip1_autoload.py", info}, f"wheel holds {sorted(tops)}")
    expect(f"[torch.backends]\n{ENTRY}" in entries, f"wheel registers {entries!r}")
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    expect(sorted(required) == ["torch>=2.6", "wrapt>=1.16"], f"wheel requires {required}")
    expect(metadata["License-Expression"] == "BSD-3-Clause", "wheel has no licence expression")
    expect(metadata["Requires-Python"] == ">=3.10", "wheel has another Requires-Python")


def check_sdist(path):
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {f"src/{name}" for name in MODULES}
    wanted |= {"LICENSE", "README.md", "pyproject.toml", "tox.ini", "tests/test_activation.py"}
    expect(names >= wanted, f"sdist lacks {sorted(wanted - names)}")
    stray = [n for n in names if "__pycache__" in n or n.startswith((".tox", ".venv"))]
    expect(not stray, f"sdist holds {stray}")


def check_installed():
    importlib.metadata.distribution("fsdp-skip1")
    (entry,) = importlib.metadata.entry_points(group="torch.backends", name="fsdp_skip1")
    entry.load()()
    expect("fsdp_skip1" not in sys.modules, "autoload turned the plugin on unasked")


def main(argument):
    if argument == "--installed":
        check_installed()
        return
    directory = pathlib.Path(argument)
    (wheel,) = directory.glob("*.whl")
    (sdist,) = directory.glob("*.tar.gz")
    check_wheel(wheel)
    check_sdist(sdist)
    print(f"check_dist: {wheel.name} and {sdist.name} are complete")


if __name__ == "__main__":
    main(sys.argv[1])

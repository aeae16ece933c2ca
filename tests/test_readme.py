"""What the README and the design notes say, as far as a program can check it."""

import inspect
import re
import shlex
from pathlib import Path

import pytest

from fsdp_skip1 import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.removeprefix("$ ").partition("  #")[0].strip()
    for kind, text in BLOCKS
    if kind == "console"
    for line in text.splitlines()
    if re.match(r"(\$ )?(\w+=\S+ )*(python\S*|tox|torchrun|fsdp-skip1) ", line)
]


def test_blocks_are_found():
    assert {kind for kind, _ in BLOCKS} >= {"console", "python", "text"}
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("block", [text for kind, text in BLOCKS if kind == "python"])
def test_the_interface_is_as_written(block):
    """Signatures as they are written: ``fsdp_skip1.enable(*, zero_copy=True) -> bool``."""
    import fsdp_skip1

    written = re.findall(r"fsdp_skip1\.(\w+)\((.*?)\)(?: -> (\w+))?", block)
    assert len(written) >= 5
    for name, parameters, returns in written:
        signature = inspect.signature(getattr(fsdp_skip1, name))
        ours = [
            str(p.replace(annotation=p.empty)).replace(" ", "")
            for p in signature.parameters.values()
        ]
        keywords = any(p.kind is p.KEYWORD_ONLY for p in signature.parameters.values())
        asked = [part.strip() for part in parameters.split(",") if part.strip() not in ("", "*")]
        assert asked == ours, name
        assert ("*" in parameters) == keywords, name
        assert returns in ("", str(signature.return_annotation)), name


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command, capsys):
    words = [word for word in shlex.split(command) if not re.match(r"\w+=", word)]
    if words[0] == "tox":
        ours, _, given = " ".join(words).partition(" -- ")
        assert not given or (ROOT / given).exists()
        asked = [env for env in ours.split()[2:] if not env.startswith("-")]
        known = (ROOT / "tox.ini").read_text()
        for env in ",".join(asked).split(",") if asked else []:
            assert all(factor in known for factor in env.removeprefix("torch").split("-")), env
    elif words[0] == "torchrun":
        (script,) = [word for word in words if word.endswith(".py")]
        assert (ROOT / script).is_file()
        for option in words[words.index(script) + 1 :]:
            assert option in (ROOT / script).read_text()
    elif words[0] == "fsdp-skip1":
        with pytest.raises(SystemExit, match="0"):
            cli.main([words[1], "--help"])
        told = capsys.readouterr().out
        assert all(word in told for word in words[2:] if word.startswith("--"))


@pytest.mark.parametrize("page", ["README.md", "docs/design.md"])
def test_files_that_are_named_exist(page):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    named = re.findall(r"`([\w/]+\.(?:py|md))`", text)
    assert links or named
    places = [(ROOT / page).parent, ROOT, ROOT / "src", ROOT / "src/fsdp_skip1", ROOT / "examples"]
    for path in [*links, *named]:
        if "://" not in path:
            assert any((place / path).exists() for place in places), path


def test_every_variable_is_explained():
    """Each ``FSDP_SKIP1…`` that the code reads."""
    source = "".join(path.read_text() for path in Path(cli.__file__).parent.rglob("*.py"))
    read = set(re.findall(r"\"(FSDP_SKIP1\w*)\"", source))
    assert "FSDP_SKIP1" in read
    assert {name for name in read if name not in README} == set()

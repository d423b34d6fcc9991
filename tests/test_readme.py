"""README.md tells the truth: its Python runs as printed, and its commands name what exists."""

import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_there_are_two_commands_and_three_snippets():
    assert len(blocks("sh")) == 2
    assert all(len(block.strip().splitlines()) == 1 for block in blocks("sh"))
    assert len(blocks("python")) == 3


@pytest.mark.parametrize("code", blocks("python"), ids=["plain", "flax", "equinox"])
def test_snippets_run(code):
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    if "y" in names:
        assert names["y"].shape == (2, 256, 128)
    else:
        assert [x.shape for x in names["gradients"]] == [(2, 1024, 8, 64)] * 3


def test_commands_name_what_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for group in re.findall(r"'\.\[([a-z0-9,]+)\]'", README) for name in group.split(",")}
    assert {"examples", "test"} <= named <= set(extras)
    for path in re.findall(r"\bexamples/\w+\.py", README) + re.findall(r"\]\(([\w/]+(?:\.\w+)?)\)", README):
        assert (ROOT / path).exists(), path

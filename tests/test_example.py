"""The example as a user runs it, at a toy size: the loss falls, a sample comes out, both attentions agree."""

import pathlib
import re
import subprocess
import sys

EXAMPLE = pathlib.Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
TINY = "--layers 1 --width 32 --heads 2 --sequence 48 --batch 8 --learning_rate 0.003"


def example(arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *TINY.split(), *arguments.split()],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loss_falls_and_a_sample_is_written():
    said = example("--steps 60 --sample_bytes 30 --prompt import")
    losses = re.search(r"loss ([\d.]+) at first, ([\d.]+) at last, held out ([\d.]+)", said)
    first, last, held = map(float, losses.groups())
    assert 5 < first < 6  # log 256: nothing known
    assert last < 4
    assert held < 4
    sample = said.split("sample:\n")[1]
    assert sample.startswith("import")
    assert len(sample.encode()) >= len("import") + 30


def test_both_attentions_train_alike():
    said = example("--compare --steps 25 --learning_rate 0.01")
    apart = float(re.search(r"losses agree: at most ([\d.e+-]+) apart", said).group(1))
    assert apart > 0  # two implementations did run

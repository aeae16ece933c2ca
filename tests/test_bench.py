"""The benchmark: what it compares, how it judges, and a real run of each kind in processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fsdp_skip1 import cli
from fsdp_skip1.bench import BenchError, options, output, results

SOURCE = Path(__file__).parents[1] / "src"


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "FSDP_SKIP1"}
    paths = os.pathsep.join(filter(None, (str(SOURCE), kept.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": paths, **changes}


def bench(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsdp_skip1", "bench", *arguments]
    return subprocess.run(
        command, env=environment(**changes), capture_output=True, text=True, timeout=300
    )


def arm(name: str, *losses: float, reference: str = "plain") -> results.Arm:
    return results.Arm(
        name,
        f"the {name} arm",
        reference,
        losses=[[loss.hex() for loss in losses]],
        milliseconds=[10.0, 12.0],
        ratio=results.Spread(1.25, 1.2, 1.3),
        data_ops={"aten.copy_": 3, "aten.cat": -1},
        collectives={"allreduce": 2},
        allocated=3 << 20,
        peak=-2048,
    )


def report(*arms: results.Arm) -> results.Report:
    comparison = results.Comparison("mlp", 1_000_000, 128, list(arms))
    comparison.judge()
    asked = {"dtype": "float32", "param_dtype": None, "reduce_dtype": None}
    asked |= {"offload": False, "prefetch": 0, "nproc": 1}
    return results.Report({"torch": "2.0", "device": "a CPU"}, asked, [comparison])


# Judging


def test_equal_losses_exit_with_0():
    assert report(arm("plain", 1.5, 1.25), arm("plugin", 1.5, 1.25)).exit_code() == 0


def test_one_bit_of_one_loss_exits_with_1():
    off = report(arm("plain", 1.5, 1.25), arm("plugin", 1.5, 1.2500000000000002))
    assert off.exit_code() == 1
    assert "DIFFER" in output.plain_table(off.comparisons[0])


@pytest.mark.parametrize("losses", [(1.5,), (1.5, float("nan")), (1.5, float("inf")), ()])
def test_losses_that_are_missing_or_not_finite_are_not_equal(losses):
    ours = [[loss.hex() for loss in losses]]
    assert not results.same_losses(ours, [[(1.5).hex(), (1.25).hex()]])
    assert not results.same_losses([], [])
    if len(losses) > 1:
        assert not results.same_losses(ours, ours)


def test_every_rank_counts():
    one, other = [(1.5).hex()], [(2.5).hex()]
    assert results.same_losses([one, other], [one, other])
    assert not results.same_losses([one, other], [one, one])


def test_a_stock_arm_may_fail_and_ours_may_not():
    plain, stock, plugin = arm("plain", 1.5), arm("stock", 1.5), arm("plugin", 1.5)
    stock.failure, stock.ratio = "RuntimeError: no such operation", None
    some = report(plain, stock, plugin)
    assert some.exit_code() == 0
    assert stock.bitwise is None
    table = output.plain_table(some.comparisons[0])
    assert "cannot run" in table
    assert "no such operation" in table
    plugin.failure = "RuntimeError"
    assert report(plain, stock, plugin).exit_code() == 1


def test_without_its_reference_an_arm_is_not_compared():
    stock, plugin = arm("hsdp-stock", 1.0, reference="hsdp-stock"), arm("hsdp-plugin", 2.0)
    stock.failure, plugin.reference = "RuntimeError", "hsdp-stock"
    some = report(arm("ddp", 3.0, reference="ddp"), stock, plugin)
    assert plugin.bitwise is None
    assert "not compared" in output.plain_table(some.comparisons[0])


def test_spread():
    assert results.Spread.of([2.0]) == results.Spread(2.0, 2.0, 2.0)
    assert results.Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == results.Spread(3.0, 2.0, 4.0)


# Output


def test_plain_table():
    table = output.plain_table(report(arm("plain", 1.5), arm("plugin", 1.5)).comparisons[0])
    header, rule, plain, plugin = table.splitlines()
    assert re.split("  +", header) == list(output.COLUMNS)
    assert set(rule) == {"-", " "}
    assert re.split("  +", plain) == ["the plain arm", "12.0 ms", "1", "2", "bit-equal"]
    costs = ["12.0 ms", "1.25 (1.20-1.30)", "+2", "2", "+3 MiB", "-2 KiB"]
    assert re.split("  +", plugin) == ["the plugin arm", *costs, "bit-equal"]
    assert len(header) == len(rule) == len(plain) == len(plugin)


def test_a_busy_machine_is_named():
    comparison = report(arm("plain", 1.5), arm("plugin", 1.5)).comparisons[0]
    assert output.notes(comparison) == []
    comparison.cpu_share = 0.98
    assert output.notes(comparison) == []
    comparison.cpu_share = 0.27
    assert "27 %" in output.plain_table(comparison)


@pytest.mark.parametrize(
    ("arguments", "library"), [(["--plot", "a.png"], "matplotlib"), (["--table", "pretty"], "rich")]
)
def test_without_the_extra_it_says_what_to_install(arguments, library, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, library, None)  # importing it raises ImportError
    assert cli.main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert 'pip install "fsdp-skip1[bench]"' in said
    assert library in said


def test_results_that_cannot_be_written_are_refused_before_measuring(tmp_path, capsys):
    for arguments in (["--json", str(tmp_path / "no" / "a.json")], ["--plot", "a.pdf"]):
        assert cli.main(["bench", *arguments]) == 2
    assert "no folder" in capsys.readouterr().err


def test_plot_and_pretty_table(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    some = report(arm("plain", 1.5), arm("plugin", 1.5))
    files = [tmp_path / "a.png", tmp_path / "a.svg"]
    for file in files:
        output.write(some, options.Options(plot=file, table="pretty"))
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files[1].read_text()
    assert "1.25 (1.20-1.30)" in capsys.readouterr().out


# The command


def test_help_imports_no_torch():
    code = (
        "import sys\nfrom fsdp_skip1 import cli\ntry:\n    cli.main(['bench', '--help'])\n"
        "except SystemExit:\n    print([m for m in ('torch', 'rich', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--nproc" in done.stdout


def test_a_family_of_models_stands_for_its_members():
    parser = cli._parser()
    args = parser.parse_args(["bench", "--model", "llama", "mlp", "llama-64"])
    models = options.from_namespace(args).model
    assert models == ("llama-768", "llama-256", "llama-64", "mlp")


@pytest.mark.parametrize(
    "arguments",
    [["--steps", "0"], ["--nproc", "-1"], ["--model", "gpt"], ["--prefetch", "-1"]],
)
def test_nonsense_is_refused(arguments):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", *arguments])


# Real runs


torch = pytest.importorskip("torch")
needs_cpu = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="FSDP2 of this torch does not run on CPU"
)


def test_every_option_has_its_model():
    from fsdp_skip1.bench import models

    assert tuple(models.SIZES) == options.MODELS


def test_the_plugin_arm_is_never_measured_with_the_plugin_off(monkeypatch):
    from fsdp_skip1 import disabled
    from fsdp_skip1.bench import arms

    monkeypatch.setenv("FSDP_SKIP1", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with disabled(), pytest.raises(BenchError, match="FSDP_SKIP1=0"):
            arms.switched_on()


@needs_cpu
def test_one_rank(tmp_path):
    numbers, traces = tmp_path / "a.json", tmp_path / "traces"
    done = bench(
        *("--model", "llama-64", "--steps", "7", "--table", "plain"),
        *("--json", str(numbers), "--trace", str(traces)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("bit-equal") == 3
    read = json.loads(numbers.read_text())
    assert read["format"] == results.FORMAT
    assert read["machine"]["torch"] == torch.__version__
    assert read["options"]["steps"] == 7
    (comparison,) = read["comparisons"]
    plain, stock, plugin = comparison["arms"]
    assert [each["name"] for each in comparison["arms"]] == ["plain", "stock", "plugin"]
    assert len(plugin["milliseconds"]) == 2  # rounds of 5 and of 2 steps
    assert plugin["losses"] == stock["losses"] == plain["losses"]
    losses = [float.fromhex(loss) for loss in plain["losses"][0]]
    assert losses[-1] < losses[0] - 0.1
    assert plugin["collectives"] == plugin["data_ops"] == {}
    assert plugin["allocated"] == plugin["peak"] == 0
    assert sum(stock["data_ops"].values()) > 0
    assert stock["allocated"] > 4 * comparison["parameters"]
    for name in ("plain", "stock", "plugin"):
        trace = json.loads((traces / f"llama-64-{name}.json").read_text())
        assert any("step (" in event.get("name", "") for event in trace["traceEvents"])


@needs_cpu
def test_two_ranks(tmp_path):
    numbers = tmp_path / "a.json"
    done = bench(
        *("--model", "llama-64", "--steps", "1", "--nproc", "2", "--prefetch", "2"),
        *("--json", str(numbers)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads(numbers.read_text())
    assert isinstance(read["wrapper"], float)
    assert "shard size 2" in done.stdout
    ddp, *others = read["comparisons"][0]["arms"]
    assert ddp["name"] == "ddp"
    assert len(ddp["losses"]) == 2
    assert ddp["losses"][0] != ddp["losses"][1]
    assert [each["name"] for each in others[:2]] == ["hsdp-stock", "hsdp-plugin"]
    for each in others:
        if each["failure"] is None:
            assert each["bitwise"]
            assert set(each["collectives"]) >= {"allreduce"}

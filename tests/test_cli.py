"""The command line and the doctor: arguments, help, exit statuses, rows, and the way out of everything in the way."""

from __future__ import annotations

import importlib.metadata
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fxamp import __main__ as cli
from fxamp import demo, doctor, errors
from fxamp.doctor import Check, Diagnosis
from tests.conftest import INSTALLED

CPU = torch.device("cpu")


# ---- the command line -----------------------------------------------------------------------------------------------------
@pytest.fixture
def started(monkeypatch) -> list[demo.DemoConfig]:
    """What the demo was started with, in place of starting it."""
    configs: list[demo.DemoConfig] = []
    monkeypatch.setattr(demo, "main", lambda config: configs.append(config) or 0)
    return configs


def test_demo_passes_its_arguments_on(started):
    line = "demo --device cpu --precision tf32 --steps 7 --seed 5 --dump some/where"
    assert cli.main(line.split()) == 0
    (config,) = started
    assert (config.device, config.precision, config.num_steps, config.seed) == ("cpu", "tf32", 7, 5)
    assert config.dump_dir == Path("some/where")


@pytest.mark.parametrize("has_gpu", [True, False])
def test_demo_by_default_uses_the_gpu_if_there_is_one(started, monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert cli.main(["demo"]) == 0
    (config,) = started
    assert (config.device, config.precision) == ("cuda" if has_gpu else "cpu", "bf16")
    assert config.num_steps == (500 if has_gpu else demo.DemoConfig().num_steps)


@pytest.mark.parametrize("status", [0, 1])
def test_status_of_the_command_is_the_exit_status(monkeypatch, status):
    seen: list[bool] = []
    monkeypatch.setattr(doctor, "main", lambda verbose: seen.append(verbose) or status)
    assert cli.main(["doctor", "--verbose"]) == status
    assert cli.main(["doctor"]) == status
    assert seen == [True, False]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: command"),
        ("demonstrate", "invalid choice: 'demonstrate'"),
        ("demo --steps 0", "'0' is not a positive whole number"),
        ("demo --steps many", "'many' is not a positive whole number"),
        ("demo --precision bf61", "invalid choice: 'bf61'"),
        ("demo --device toaster", "'toaster' cannot be used here"),
        ("doctor --precision bf16", "unrecognized arguments: --precision bf16"),
    ],
)
def test_wrong_usage(capsys, started, line, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(line.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert started == []


def test_precision_to_come_is_refused_before_anything_is_trained(capsys, started):
    assert cli.main(["demo", "--precision", "fp8", "--device", "cpu"]) == 2
    assert "ERROR[NotYet]: precision='fp8' is not implemented yet" in capsys.readouterr().err
    assert started == []


def test_error_of_fxamp_is_text_and_not_a_traceback(capsys, monkeypatch):
    def fail(config: demo.DemoConfig) -> int:
        raise demo.NoText("no text", way_out="Find some")

    monkeypatch.setattr(demo, "main", fail)
    assert cli.main(["demo", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "ERROR[NoText]: no text. Find some\n"
    assert issubclass(demo.NoText, errors.FxampError)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--help", ("demo", "train a small GPT in fp32 and through fxamp", "doctor", "what is in the way", "exit status: 0")),
        ("demo --help", ("--device", "--precision", "--steps", "--seed", "--dump DIR", "default: bf16", "fxamp-demo-dump")),
        ("doctor --help", ("--verbose", "Says the way out of what is not well.", "exit status: 0")),
    ],
)
def test_help(capsys, monkeypatch, line, parts):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        cli.main(line.split())
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize(("command", "status"), [("--help", 0), ("demonstrate", 2)])
def test_python_m_fxamp(command, status):
    root = Path(cli.__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "fxamp", command], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == status
    assert "usage: python -m fxamp" in done.stdout + done.stderr


# ---- the doctor's table ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    """Of this machine, once: it compiles."""
    return doctor.diagnose()


def test_doctor_has_a_row_for_everything(diagnosis):
    names = [check.name for check in diagnosis.checks]
    assert len(names) == len(set(names))
    assert names[:3] == ["fxamp", "torch", "Python"]
    for device in doctor.all_devices():
        start = names.index(str(device))
        assert names[start + 1 : start + 6] == [f"{device}: {p}" for p in ("bf16", "fp16", "tf32", "fp8", "auto")]
        assert f"compiles on {device.type}" in names
    for name in ("entry point", "torch.compile", "Inductor cache", "C++ compiler", "triton"):
        assert name in names


def test_doctor_tells_the_truth_about_this_machine(diagnosis):
    assert torch.__version__ in diagnosis["torch"].finding
    assert sys.version.split()[0] in diagnosis["Python"].finding
    is_native, reason = doctor.formats.native_support(CPU, "bf16")
    assert diagnosis["cpu: bf16"].verdict == ("ok" if is_native else "note")
    assert reason in diagnosis["cpu: bf16"].finding
    assert diagnosis["cpu: fp16"].finding.endswith("; gradients are scaled: call amp.attach(optimizer)")
    assert diagnosis["cpu: fp8"].finding.endswith("; not in this version of fxamp")
    assert "scaled" not in diagnosis["cpu: bf16"].finding
    assert diagnosis["cpu: auto"].finding.startswith("bf16" if is_native else "fp32")
    assert diagnosis["compiles on cpu"].finding.startswith("yes, in bf16" if is_native else "yes, in fp32")
    # These tests compile, so only a missing installation can be in the way here.
    blocks = [check.name for check in diagnosis.checks if check.verdict == "blocks"]
    assert blocks == ([] if INSTALLED else ["entry point"])


def test_every_row_is_printed_with_its_verdict(diagnosis):
    out = io.StringIO()
    console = Console(file=out, width=400, no_color=True)
    console.print(doctor.table(diagnosis))
    rows = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    for check in diagnosis.checks:
        assert f"{check.name} {check.verdict} {' '.join(check.finding.split())}" in rows


def test_finding_is_no_markup():
    out = io.StringIO()
    console = Console(file=out, width=80, no_color=True)
    console.print(doctor.table(Diagnosis(checks=(Check(name="compiles", finding="no: ERROR[NotYet]: [bold]x"),))))
    assert "ERROR[NotYet]: [bold]x" in out.getvalue()


@pytest.mark.parametrize(
    ("verdict", "status", "last"),
    [
        ("ok", 0, "Nothing prevents compilation."),
        ("note", 0, "Nothing prevents compilation."),
        ("blocks", 1, "Something prevents compilation."),
    ],
)
def test_exit_status_and_conclusions(monkeypatch, verdict, status, last):
    check = Check(name="thing", finding="there", verdict=verdict, way_out="Go around", detail="Traceback ...")
    made = Diagnosis(checks=(Check(name="other", finding="there"), check))
    assert doctor.conclusions(made) == ["thing: Go around.", last]
    assert doctor.conclusions(made, verbose=True) == ["thing: Go around.", "Traceback ...", last]
    monkeypatch.setattr(doctor, "diagnose", lambda: made)
    out = io.StringIO()
    console = Console(file=out, width=80)
    assert doctor.main(console=console) == status
    assert last in out.getvalue()


# ---- what is in the way ---------------------------------------------------------------------------------------------------
def test_missing_entry_point_blocks(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **query: [])
    check = doctor.entry_point()
    assert (check.verdict, "not registered" in check.finding) == ("blocks", True)
    assert "pip install" in check.way_out


@pytest.mark.parametrize(("value", "verdict"), [("fxamp.gone:named_backend", "blocks"), ("fxamp.backend:named_backend", "ok")])
def test_entry_point_is_loaded(monkeypatch, value, verdict):
    point = importlib.metadata.EntryPoint(name="fxamp", group="torch_dynamo_backends", value=value)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **query: [point])
    check = doctor.entry_point()
    assert check.verdict == verdict
    assert value in check.finding


@pytest.mark.installed
def test_entry_point_of_this_installation():
    assert doctor.entry_point() == Check(name="entry point", finding='backend="fxamp" is fxamp.backend:named_backend')


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert doctor.cache_directory() == Check(name="Inductor cache", finding=str(tmp_path))

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new" / "one"))
    assert doctor.cache_directory().finding == f"{tmp_path / 'new' / 'one'} (not made yet)"
    assert not (tmp_path / "new").exists()

    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    check = doctor.cache_directory()
    assert (check.verdict, "because of" in check.finding) == ("blocks", True)
    assert "TORCHINDUCTOR_CACHE_DIR" in check.way_out


@pytest.mark.parametrize(("is_needed", "verdict"), [(True, "blocks"), (False, "note")])
def test_missing_cpp_compiler(is_needed, verdict):
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        check = doctor.cpp_compiler(is_needed=is_needed)
    assert (check.verdict, check.finding) == (verdict, "none found (looked for no-such-compiler)")
    assert "CXX" in check.way_out


@pytest.mark.parametrize(
    ("is_there", "is_needed", "verdict"), [(False, True, "blocks"), (False, False, "ok"), (True, True, "ok")]
)
def test_triton(monkeypatch, is_there, is_needed, verdict):
    import torch.utils._triton as torch_triton

    monkeypatch.setattr(torch_triton, "has_triton_package", lambda: is_there)
    monkeypatch.setitem(sys.modules, "triton", type(sys)("triton"))
    monkeypatch.setattr(sys.modules["triton"], "__version__", "3.14.15", raising=False)
    check = doctor.triton(is_needed=is_needed)
    assert check.verdict == verdict
    assert ("3.14.15" in check.finding) is is_there


def test_switched_off_compilation_blocks():
    import torch._dynamo.config as dynamo_config

    assert doctor.compile_switch().verdict == "ok"
    with dynamo_config.patch(disable=True):
        switch, trial = doctor.compile_switch(), doctor.trial(CPU, is_needed=True)
    assert (switch.verdict, "TORCH_COMPILE_DISABLE" in switch.way_out) == ("blocks", True)
    assert (trial.verdict, trial.finding) == ("blocks", "no graph reached fxamp, the function ran eagerly")


@pytest.mark.parametrize(("is_needed", "verdict"), [(True, "blocks"), (False, "note")])
def test_trial_without_a_compiler_fails(is_needed, verdict):
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        check = doctor.trial(CPU, is_needed=is_needed)
    assert check.verdict == verdict
    assert check.finding.startswith("no: ")
    assert "C++ compiler" in check.way_out
    assert "Traceback" in check.detail


def test_wrong_result_is_found(monkeypatch):
    monkeypatch.setattr(doctor, "_runs_right", lambda device, factor, compile_: compile_(torch.sin)(torch.ones(2)) is None)
    check = doctor.trial(CPU, is_needed=True)
    assert (check.verdict, check.finding) == ("blocks", "compiles, but the result is wrong")


@pytest.mark.parametrize(("error", "is_right"), [(0.0, True), (2**-8, True), (0.1, False), (-1.0, False)])
def test_trial_allows_for_rounding_only(error, is_right):
    assert doctor._runs_right(CPU, 1.0, lambda f: lambda x, weight: f(x, weight) * (1 + error)) is is_right


def test_trial_allows_for_bf16():
    def in_bf16(f):
        return lambda x, weight: f(x.bfloat16(), weight.bfloat16()).float()

    assert doctor._runs_right(CPU, 1.0, in_bf16)

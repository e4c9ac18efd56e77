"""The README tells the truth: its files, commands and tables are the real ones; and imports run one way."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from config import TrainConfig
from experiments import (
    ablations,
    anatomy,
    check_port,
    compare,
    icl,
    length,
    maps,
    outliers,
    readme,
    report,
    retrieval,
    scaling,
    speed,
    tune,
)
from export import ExportConfig
from run_log import EventsConfig
from sample import SampleConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(python .*?)(?:  +#.*)?$", "\n".join(re.findall(r"```sh\n(.*?)```", README, re.S)), re.M)
CONFIGS = {
    "train.py": TrainConfig,
    "sample.py": SampleConfig,
    "experiments.check_port": check_port.CheckPortConfig,
    "export.py": ExportConfig,
    "run_log.py": EventsConfig,
    "experiments.ablations": ablations.AblationsConfig,
    "experiments.anatomy": anatomy.AnatomyConfig,
    "experiments.compare": compare.CompareConfig,
    "experiments.icl": icl.IclConfig,
    "experiments.length": length.LengthConfig,
    "experiments.maps": maps.MapsConfig,
    "experiments.outliers": outliers.OutliersConfig,
    "experiments.report": report.ReportConfig,
    "experiments.retrieval": retrieval.RetrievalConfig,
    "experiments.scaling": scaling.ScalingConfig,
    "experiments.speed": speed.SpeedConfig,
    "experiments.tune": tune.TuneConfig,
}


def test_there_is_something_to_check():
    assert len(COMMANDS) > 5 and README.count("![") >= 2


def test_file_list_is_complete():
    section = README.split("\n## Files")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `([^`]+)` \|", section, re.M))
    try:
        tracked = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    code = {f for f in tracked if f.endswith(".py") and not f.startswith("tests/")}
    assert code and code - listed == set(), "files that the README does not list"
    assert {f for f in listed if not (ROOT / f).exists()} == set(), "files that do not exist"


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_commands_parse(command):
    """Every flag of every command in the README exists and takes its value."""
    import shlex

    words = shlex.split(command)[1:]
    if words[0] == "-m":
        words = words[1:]
    if words[0] in CONFIGS:
        tyro.cli(CONFIGS[words[0]], args=words[1:])
    else:
        assert words == ["attention_numpy.py"]


def test_the_two_commands_are_there():
    """Report 52."""
    assert "\npip install -r requirements.txt && python train.py\n" in README
    assert "\npip install -r requirements-dev.txt && pytest\n" in README


def test_tables_are_the_results(monkeypatch, tmp_path):
    assert README.count("<!-- ") >= 6 and readme.filled(README) == README
    spoilt = README.replace(" ± 0.0", " ± 0.1")
    assert spoilt != README and readme.filled(spoilt) == README
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text(spoilt, encoding="utf-8")
    readme.main()
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == README
    with pytest.raises(ValueError, match="compare-nothing.json does not exist"):
        readme.filled("<!-- compare-nothing: losses -->\n")


def test_pictures_are_there():
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / picture).exists(), picture
        assert (ROOT / picture).with_suffix(".json").exists(), f"no numbers behind {picture}"


def imported(file):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


def test_an_installed_package_is_whole():
    modules = re.search(r"py-modules = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.S)[1]
    assert sorted(re.findall(r'"(\w+)"', modules)) == sorted(path.stem for path in ROOT.glob("*.py"))


def test_imports_run_one_way():
    """Report 45."""
    allowed = {
        "attention_numpy.py": set(), "generation.py": set(), "blocks.py": set(), "initial.py": set(),
        "linear.py": set(), "dropout.py": set(), "health.py": set(), "process.py": set(),
        "model.py": {"blocks", "dropout", "generation", "initial", "linear"},
        "foreign.py": {"model"}, "checkpoint.py": {"model", "foreign"}, "config.py": {"model", "data"},
        "device.py": set(), "cost.py": {"model"}, "distributed.py": {"device"}, "evaluate.py": {"distributed"},
        "report.py": {"checkpoint", "data"}, "sample.py": {"checkpoint", "data", "device", "generation", "process"},
        "run_log.py": {"model", "checkpoint", "config"}, "llama.py": {"model", "config"},
        "export.py": {"model", "checkpoint", "config", "data", "llama"},
        "train.py": set(
            "model checkpoint foreign config data device cost distributed dropout evaluate health process report"
            " run_log".split()
        ),
    }  # fmt: skip
    own = {Path(file).stem for file in allowed} | {"data", "experiments"}
    for file, names in allowed.items():
        assert imported(file) & own <= names, file
    assert imported("attention_numpy.py") == {"math", "numpy"}
    assert imported("model.py") - sys.stdlib_module_names == {"torch", *allowed["model.py"]}
    for file in (ROOT / "data").glob("*.py"):
        assert not imported(file) & ((own | {"torch"}) - {"data"}), file

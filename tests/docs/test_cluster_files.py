"""docs/cluster/: the manifest has what KubeRay requires, the Slurm script says what it should, and so on."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import fedsweep
from fedsweep.cli import app
from fedsweep.config.load import load_config
from fedsweep.fleet.ray_metrics import GAUGES, TAGS

STAND_INS = {
    "scontrol": "printf 'first\\nsecond\\nthird\\n'",
    "srun": 'case "$3" in --nodelist=first) echo "10.0.0.7 172.17.0.1" ;; *) printf "%s\\n" "$@" > "$ASKED" ;; esac',
    "ray": 'echo "$@" >> "$RAY_CALLS"',
}


def manifest(pages: Any) -> dict[str, Any]:
    found = yaml.safe_load((pages.root / "docs/cluster/rayjob.yaml").read_text())
    assert isinstance(found, dict)
    return found


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def test_the_manifest_is_a_rayjob_with_the_required_fields(pages: Any) -> None:
    job = manifest(pages)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["metadata"]["name"]
    spec = job["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    for container in containers(spec):
        assert container["name"] and container["image"].endswith(f"fedsweep:{fedsweep.__version__}")
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
    for group in spec["rayClusterSpec"]["workerGroupSpecs"]:
        assert group["groupName"] and group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["rayStartParams"] == {}


def test_the_manifests_ray_is_the_one_that_is_pinned(pages: Any) -> None:
    version = manifest(pages)["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"ray=={version}" in (pages.root / "constraints.txt").read_text().split()
    assert f"FROM rayproject/ray:{version}-py311" in (pages.root / "docs/cluster.md").read_text()


def test_every_mount_of_the_manifest_has_a_volume(pages: Any) -> None:
    cluster = manifest(pages)["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounts = {mount["name"]: mount for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]} == {"experiment", "results"}
        # Trials of a sweep write where they run, and modules of one's own are imported there.
        assert not mounts["results"].get("readOnly")
        path = mounts["experiment"]["mountPath"]
        assert all({"name": "PYTHONPATH", "value": path} in container["env"] for container in pod["containers"])


def test_the_manifests_entrypoint_is_a_command_that_fits_its_workers(pages: Any) -> None:
    spec = manifest(pages)["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:2] == ["fedsweep", "run"]
    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    options = {option for parameter in run.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options
    runtime = load_config({}, [words[k + 1] for k, word in enumerate(words) if word == "--set"]).runtime
    group = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    cpus = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    assert runtime.client_actors == group["replicas"] * cpus


def test_the_slurm_script_parses(pages: Any) -> None:
    done = subprocess.run(["bash", "-n", pages.root / "docs/cluster/slurm.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def slurm(pages: Any, tmp_path: Path) -> Any:
    """Runs the script with stand-ins for Slurm and Ray; gives what it asks srun to start, and the calls of ray."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    (programs / "activate").touch()
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "FEDSWEEP_VENV": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_CPUS_PER_TASK": "8",
        "ASKED": str(tmp_path / "asked"),
        "RAY_CALLS": str(tmp_path / "ray-calls"),
    }

    def submit(*arguments: str, **more: str) -> tuple[list[str], str]:
        script = ["bash", str(pages.root / "docs/cluster/slurm.sh"), *arguments]
        done = subprocess.run(script, env=environment | more, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return (tmp_path / "asked").read_text().splitlines(), (tmp_path / "ray-calls").read_text()

    submit.environment = environment  # type: ignore[attr-defined]
    (tmp_path / "experiment.yaml").write_text("name: e\n")
    return submit


def fedsweep_of(asked: list[str]) -> list[str]:
    """What runs on the first node, behind the shell that leaves its number."""
    return asked[asked.index("--") + 5 :]


def test_the_slurm_script_starts_ray_everywhere_and_fedsweep_on_the_first_node(slurm: Any) -> None:
    asked, calls = slurm("experiment.yaml", "out")
    assert calls == "get-auth-token --generate\n"
    assert asked[:3] == ["--nodes=3", "--ntasks=3", "ray"]
    split = asked.index("--")
    started = ["symmetric-run", "--address", "10.0.0.7:23456", "--min-nodes", "3", "--num-cpus=8", "--num-gpus=0"]
    assert asked[3:split] == started
    command = fedsweep_of(asked)
    assert command[:5] == ["fedsweep", "run", "experiment.yaml", "--out", "out"]
    runtime = load_config({}, [command[k + 1] for k, word in enumerate(command) if word == "--set"]).runtime
    assert (runtime.address, runtime.client_actors) == ("auto", 24)


def test_the_slurm_script_goes_on_with_an_unfinished_run(slurm: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").touch()
    asked, _ = slurm("experiment.yaml", "out")
    assert fedsweep_of(asked) == ["fedsweep", "run", "--resume", "out"]


def test_the_slurm_script_gives_each_gpu_an_actor(slurm: Any) -> None:
    asked, _ = slurm("experiment.yaml", "out", SLURM_GPUS_ON_NODE="2")
    assert "--num-gpus=2" in asked
    command = fedsweep_of(asked)
    runtime = load_config({}, [command[k + 1] for k, word in enumerate(command) if word == "--set"]).runtime
    assert (runtime.client_actors, runtime.gpus_per_client) == (6, 1.0)


def test_the_slurm_script_sweeps_and_goes_on_with_a_sweep(slurm: Any, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("name: s\nsweep: {seeds: 2}\n")
    asked, _ = slurm("sweep.yaml", "out")
    assert fedsweep_of(asked) == ["fedsweep", "sweep", "sweep.yaml", "--out", "out", "--set", "runtime.address=auto"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sweep.json").touch()
    asked, _ = slurm("sweep.yaml", "out")
    assert fedsweep_of(asked) == ["fedsweep", "sweep", "--resume", "--out", "out", "--set", "runtime.address=auto"]


def test_the_slurm_script_tells_fedsweep_alone_that_the_time_ends(pages: Any, slurm: Any, tmp_path: Path) -> None:
    """Slurm signals the batch script; fedsweep's exit code is the job's, and Ray is not signalled."""
    programs = tmp_path / "bin"
    overlapping = 'if [ "$1" = --overlap ]; then shift 4; exec "$@"; fi'
    runs = 'while [ "$1" != -- ]; do shift; done; shift; "$@"'
    first = 'if [ "$3" = --nodelist=first ]; then echo 10.0.0.7; exit; fi'
    (programs / "srun").write_text(f"#!/bin/bash\n{overlapping}\n{first}\n{runs}\n")
    body = "trap 'echo told; exit 130' USR1; echo begun; for k in $(seq 300); do sleep 0.1; done"
    (programs / "fedsweep").write_text(f"#!/bin/bash\n{body}\n")
    (programs / "fedsweep").chmod(0o755)
    script = ["bash", str(pages.root / "docs/cluster/slurm.sh"), "experiment.yaml", "out"]
    with subprocess.Popen(script, env=slurm.environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "begun\n"
        job.send_signal(signal.SIGUSR1)
        assert job.communicate(timeout=60)[0] == "told\n"
    assert job.returncode == 130
    assert not list(tmp_path.glob(".fedsweep-*.pid"))


def test_the_slurm_script_gives_srun_the_cpus_of_a_task(pages: Any) -> None:
    text = (pages.root / "docs/cluster/slurm.sh").read_text()
    assert 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"' in text
    assert "#SBATCH --signal=B:USR1@300" in text


def test_the_slurm_script_asks_for_its_arguments(pages: Any) -> None:
    done = subprocess.run(["bash", pages.root / "docs/cluster/slurm.sh"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "usage: sbatch slurm.sh CONFIG OUT" in done.stderr


def dashboard(pages: Any) -> dict[str, Any]:
    found = json.loads((pages.root / "docs/cluster/grafana-dashboard.json").read_text())
    assert isinstance(found, dict)
    return found


def queries(board: dict[str, Any]) -> list[str]:
    drawn = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return drawn + [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]


def metrics_of_ray() -> str:
    """The text in which Ray defines its own dashboard; importing it would need the extra."""
    ray = importlib.util.find_spec("ray")
    assert ray is not None and ray.origin is not None
    return (Path(ray.origin).parent / "dashboard/modules/metrics/dashboards/default_dashboard_panels.py").read_text()


def test_the_dashboard_draws_only_what_fedsweep_or_ray_exports(pages: Any) -> None:
    named = {name for query in queries(dashboard(pages)) for name in re.findall(r"\bray_\w+", query)}
    own = {f"ray_{name}" for name in GAUGES}
    assert own <= named
    rays = metrics_of_ray()
    assert {name for name in named - own if f"{name}{{" not in rays} == set()


def test_the_dashboard_filters_and_groups_by_tags_that_exist(pages: Any) -> None:
    board = dashboard(pages)
    ours = [query for query in queries(board) if "ray_fedsweep_" in query]
    used = {tag for query in ours for group in re.findall(r"by \(([^)]*)\)", query) for tag in group.split(", ")}
    used |= {tag for query in ours for tag in re.findall(r"(\w+)=~", query)}
    used |= {v["query"]["query"].removesuffix(")").split(", ")[-1] for v in board["templating"]["list"][1:]}
    assert used == set(TAGS)
    legends = [t["legendFormat"] for panel in board["panels"] for t in panel["targets"] if t["expr"] in ours]
    assert {tag for legend in legends for tag in re.findall(r"{{(\w+)}}", legend)} <= set(TAGS)


def test_the_dashboard_is_one_that_grafana_imports(pages: Any) -> None:
    board = dashboard(pages)
    assert board["schemaVersion"] >= 36 and board["uid"] and board["title"] and "id" not in board
    source, *variables = board["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert [variable["name"] for variable in variables] == ["sweep", "method", "run"]
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    for thing in [*variables, *panels, *(target for panel in panels for target in panel["targets"])]:
        assert thing["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24 and panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    for query in queries(board):
        for opening, closing in ("()", "{}"):
            assert query.count(opening) == query.count(closing), query


def test_the_dashboard_has_what_a_sweep_is_watched_by(pages: Any) -> None:
    titles = " ".join(panel["title"] for panel in dashboard(pages)["panels"])
    for subject in ("accuracy", "Rounds", "Bytes sent", "by trial", "by method", "Actors", "GPU share"):
        assert subject in titles

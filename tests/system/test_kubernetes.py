"""launch/kubernetes/job.yaml: valid to the letter; its command runs on emulated machines."""

import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from tests.ranks import REPOSITORY
from tests.system.machines import emulate, why_not
from tests.system.waiting import PATIENCE, read, wait_for
from tests.tiny import OVERRIDES


def _documents() -> list[dict]:
    return list(yaml.safe_load_all((REPOSITORY / "launch" / "kubernetes" / "job.yaml").read_text()))


@pytest.mark.filterwarnings("default")  # of the package itself
def test_the_job_is_valid():
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    documents = _documents()
    for document in documents:
        validate(document, "1.31", strict=True)
    documents[-1]["spec"]["template"]["spec"]["subdomian"] = "hrm"
    with pytest.raises(Exception, match="subdomian"):
        validate(documents[-1], "1.31", strict=True)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_pods_save_when_one_is_preempted_and_go_on_when_started_again(tmp_path, sudoku_folder):
    """Both pods fail then, at once, or the one that is started again would wait for the other in vain."""
    job = _documents()[-1]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environment["NODES"] == str(job["completions"])
    environment |= {"PROCESSES": "1", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    (tmp_path / "pretrain.py").symlink_to(REPOSITORY / "pretrain.py")
    path = f"{REPOSITORY / '.venv' / 'bin'}:{os.environ['PATH']}"
    words = [*OVERRIDES, "compile=false", "epochs=6", "eval_interval=null", "log_interval=1"]
    command = [*container["command"], *container["args"][:2], f"data_path={sudoku_folder}", *words]
    run, output = tmp_path / environment["RUN"], tmp_path / "output.txt"

    with emulate(
        2, tmp_path / "machines", name="hrm-{}", domain=job["template"]["spec"]["subdomain"]
    ) as pods:

        def start(pod: int):
            variables = os.environ | environment | {"PATH": path, "HOSTNAME": f"hrm-{pod}"}
            with output.open("a") as file:
                return pods.start(pod, command, cwd=tmp_path, env=variables, stdout=file, stderr=file)

        def status() -> dict:
            return json.loads(Path(run / "status").read_text())

        started = [start(0), start(1)]
        wait_for(lambda: read(run / "metrics.jsonl"), "no step", output=output)
        started[1].send_signal(signal.SIGTERM)
        assert [pod.wait(PATIENCE) for pod in started] == [1, 1], read(output)
        assert status()["status"] == "stopped"
        assert (run / f"step_{status()['step']}").exists()

        started = [start(0), start(1)]
        assert [pod.wait(PATIENCE) for pod in started] == [0, 0], read(output)
        assert status() == {"status": "finished", "step": 50}
    assert read(output).count("going on from") == 1

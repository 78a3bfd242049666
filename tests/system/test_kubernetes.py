"""launch/kubernetes: valid to the letter; its command runs on emulated machines."""

import json
import os
import signal

import pytest
import yaml

from tests.ranks import REPOSITORY
from tests.system.machines import emulate, why_not
from tests.tiny import OVERRIDES
from tests.waiting import PATIENCE, read, wait_for

_DOCUMENTS = list(yaml.safe_load_all((REPOSITORY / "launch" / "kubernetes" / "job.yaml").read_text()))


@pytest.mark.filterwarnings("default")  # of the package itself
def test_the_manifests_are_valid():
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    store = (REPOSITORY / "launch" / "kubernetes" / "rendezvous.yaml").read_text()
    for document in [*_DOCUMENTS, *yaml.safe_load_all(store)]:
        validate(document, "1.31", strict=True)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_pods_save_when_one_is_preempted_and_go_on_when_started_again(tmp_path, sudoku_folder):
    """Both pods fail then, at once, or the one that is started again would wait for the other in vain."""
    job = _DOCUMENTS[-1]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    environment = os.environ | {entry["name"]: entry.get("value", "uid") for entry in container["env"]}
    assert environment["NODES"] == str(job["completions"])
    environment |= {"PROCESSES": "1", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    environment["PATH"] = f"{REPOSITORY / '.venv' / 'bin'}:{os.environ['PATH']}"
    (tmp_path / "pretrain.py").symlink_to(REPOSITORY / "pretrain.py")
    words = [*OVERRIDES, "compile=false", "epochs=6", "eval_interval=null", "log_interval=1"]
    command = [*container["command"], *container["args"][:2], f"data_path={sudoku_folder}", *words]
    run, output = tmp_path / environment["RUN"], tmp_path / "output.txt"
    domain = job["template"]["spec"]["subdomain"]
    with emulate(2, tmp_path / "machines", name="hrm-{}", domain=domain) as pods, output.open("a") as file:
        options = {"cwd": tmp_path, "stdout": file, "stderr": file}
        for signals, status, statuses in ((True, "stopped", [1, 1]), (False, "finished", [0, 0])):
            started = [
                pods.start(pod, command, env=environment | {"HOSTNAME": f"hrm-{pod}"}, **options)
                for pod in (0, 1)
            ]
            if signals:
                wait_for(lambda: read(run / "metrics.jsonl"), "no step", output=output)
                started[1].send_signal(signal.SIGTERM)
            assert [pod.wait(PATIENCE) for pod in started] == statuses, read(output)
            found = json.loads(read(run / "status"))
            assert found["status"] == status
            assert (run / f"step_{found['step']}").exists()
    assert found["step"] == 50
    assert read(output).count("resuming from") == 1
    assert "recovered: " not in read(output), "nothing has failed"

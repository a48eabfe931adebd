import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import typer
import yaml

from spmd_tx.cli import main
from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.server.worker_setup import compilation_cache
from spmd_tx.demo import tiny_model
from spmd_tx.group_names import template_of
from spmd_tx.group_options import read_pairs, with_groups
from tests.support.ports import free_port
from tests.support.processes import command_line, kill, until_ended

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
MULTINODE = LAUNCH / "multinode.sh"

# Runs here what it is to run there, and notes for whom.
SSH = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do
    if [[ $1 == -o ]]; then shift; fi
    shift
done
echo "$1 $2" >> "$(dirname "$0")/ssh.log"
host=$1
shift
if [[ $host == lost* ]]; then
    echo "ssh: Could not resolve hostname $host" >&2
    exit 255
fi
echo "Welcome to $host, says a login shell"
exec bash -c "$*"
"""

# The real command line, with fake workers.
SPMD_TX = f"""#!{sys.executable}
import sys
from functools import partial
sys.path.insert(0, {str(ROOT)!r})
from spmd_tx.cli import main
worker = [{str(ROOT / "tests/coordinator/mesh/fake_worker.py")!r}]
if sys.argv[1] == "worker":
    from spmd_tx.coordinator.agent import main as remote_agent
    remote_agent.run = partial(remote_agent.run, worker=worker)
elif sys.argv[1] == "serve":
    from spmd_tx.coordinator.mesh import generations
    from spmd_tx.coordinator.server import serve as server
    generations.FIRST_DELAY = 0.01
    server.serve = partial(server.serve, worker=worker)
main.main()
"""


@pytest.fixture
def programs(tmp_path):
    """A folder with the programs that the script calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("ssh", SSH), ("spmd-tx", SPMD_TX)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


class Launched:
    """A running script, and what it has started."""

    def __init__(self, process, url, programs):
        self.process, self.url, self.programs = process, url, programs

    def wait_until_ready(self, group="main", timeout=180):
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/readyz", params={"group": group}).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        raise AssertionError("it is not ready")

    def find(self, pattern):
        """What runs below the script with such a command line."""
        return [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if (words := command_line(child)) and re.search(pattern, " ".join(words)) and words[0] != "bash"
        ]

    def end(self, timeout=60):
        _, said = self.process.communicate(timeout=timeout)
        return self.process.returncode, said


@contextmanager
def launched(programs, tmp_path, *options, hosts=("user@localhost", "node-b"), serve=()):
    port = free_port()
    model = tiny_model.write(tmp_path / "model")
    command = [MULTINODE, "--worker-port", str(free_port()), "--restart-after", "0.2", *options, *hosts, "--"]
    command += ["--base-model", model, "--data-dir", tmp_path / "data", "--port", str(port)]
    command += ["--max-context-length", "256", *serve]
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield Launched(process, f"http://127.0.0.1:{port}", programs)
        finally:
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()
            kill(below)


def test_the_script_says_how_it_is_used():
    told = subprocess.run([MULTINODE, "--help"], capture_output=True, text=True, check=True).stdout
    assert "Usage: launch/multinode.sh [OPTIONS] HOST... -- OPTIONS OF spmd-tx serve" in told


OPTIONS = ("--hosts", "--gpus-per-node", "--process-per", "--worker-port", "--restart-after", "--directory")


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ("", "no HOST is named"),
        ("node-a", "no options of spmd-tx serve stand behind HOST... --"),
        ("node-a --", "no options of spmd-tx serve stand behind HOST... --"),
        ("-- --base-model m", "no HOST is named"),
        ("--no-such a -- b", "there is no option --no-such"),
        *((option, f"{option} has no value") for option in OPTIONS),
        *((f"{option} -- b", f"{option} has no value") for option in OPTIONS),
        *((f"{option}= a -- b", f"{option} ") for option in OPTIONS if option != "--directory"),
        ("--hosts teacher -- b", "--hosts is 'teacher'; write it as GROUP=HOST,HOST"),
        ("--hosts teacher= a -- b", "--hosts is 'teacher='; write it as GROUP=HOST,HOST"),
        ("--hosts teacher=a,,b a -- b", "--hosts is 'teacher=a,,b'; write it as GROUP=HOST,HOST"),
        ("--hosts teacher=b a -- --base-model m", "no --group name=teacher,... stands behind --"),
        ("--hosts teacher=b -- --base-model m", "no HOST is named"),
        ("--process-per rack a -- b", "--process-per is 'rack'; it must be node or gpu"),
        ("--process-per=rack a -- b", "--process-per is 'rack'; it must be node or gpu"),
        ("--gpus-per-node 0 a -- b", "--gpus-per-node is '0'; it must be a number from 1 to"),
        ("--gpus-per-node many a -- b", "--gpus-per-node is 'many'"),
        ("--worker-port 99999 a -- b", "--worker-port is '99999'; it must be a number from 1 to 65535"),
        ("--worker-port 08 --restart-after soon a -- b", "--restart-after is 'soon'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(arguments, complaint):
    done = subprocess.run([MULTINODE, *arguments.split()], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert complaint in done.stderr
    assert "line " not in done.stderr  # no words of bash


def test_a_host_that_ssh_does_not_reach_is_refused_at_once(programs):
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = [MULTINODE, "node-a", "lost-host", "--", "--base-model", "m"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert "Could not resolve hostname lost-host" in done.stderr
    assert "ssh cannot run anything on lost-host (code 255); check the name" in done.stderr
    assert "spmd-tx" not in (programs / "ssh.log").read_text()


# Notes its id and its arguments, and runs until it is told to end.
LASTING = """#!/usr/bin/env bash
echo "$$ $*" >> "$(dirname "$0")/starts.log"
trap 'exit 0' TERM
while true; do sleep 0.05; done
"""


@contextmanager
def lasting(programs, command, count):
    """Run a script with programs that only last; yield it and all processes, when so many have started."""
    (programs / "spmd-tx").write_text(LASTING)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    log = programs / "starts.log"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as script:
        process, everything = psutil.Process(script.pid), []
        try:
            while not (log.exists() and len(log.read_text().splitlines()) == count):
                assert script.poll() is None
                time.sleep(0.02)
            everything = process.children(recursive=True)
            yield script, everything
        finally:
            kill([process, *everything])


@pytest.mark.parametrize(
    "command, count",
    [([MULTINODE, "node-a", "node-b", "--", "--base-model", "m"], 2), ([LAUNCH / "single_node.sh", "m"], 1)],
    ids=["multinode", "single_node"],
)
def test_nothing_outlives_a_script_that_is_killed(programs, command, count):
    with lasting(programs, command, count) as (script, everything):
        script.kill()
        until_ended(everything)
    assert len((programs / "starts.log").read_text().splitlines()) == count  # none was started again


def test_the_first_host_may_be_an_ipv6_address(programs):
    command = [MULTINODE, "--worker-port=7000", "user@fd00::1", "node-b", "--", "--base-model", "m"]
    with lasting(programs, command, 2):
        assert "worker --coordinator [fd00::1]:7000 " in (programs / "starts.log").read_text()


@pytest.mark.parametrize("seconds", ["soon", "-1", "''"])
def test_one_host_waits_a_number_of_seconds(seconds):
    environment = os.environ | {"RESTART_AFTER": seconds}
    command = [LAUNCH / "single_node.sh", "m"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert f"RESTART_AFTER is '{seconds}'; it must be a number of seconds" in done.stderr


def test_hosts_serve_together_and_end_in_order(programs, tmp_path):
    """One of them has a group of its own."""
    teacher = tiny_model.write(tmp_path / "teacher")
    group = f"name=teacher,base_model={teacher},served_model_name=teacher,role=sample,max_context_length=256"
    options = ("--gpus-per-node", "1", "--hosts", "teacher=node-c")
    serve = ["--fully-sharded-data-parallel-size", "2", "--group", group]
    with launched(programs, tmp_path, *options, serve=serve) as script:
        script.wait_until_ready("main")
        script.wait_until_ready("teacher")
        waiting = 'spmd_tx_group_waiting_tokens{group="teacher"} 0.0\n'
        assert waiting in httpx.get(f"{script.url}/metrics").text
        everything = psutil.Process(script.process.pid).children(recursive=True)
        (server,) = script.find("spmd-tx serve")
        secret = server.environ()["SPMD_TX_SECRET"]
        assert len(secret) == 64
        assert not [child for child in everything if secret in " ".join(command_line(child))]
        script.process.send_signal(signal.SIGTERM)
        code, said = script.end()
        assert code == 0, said
        until_ended(everything)
    calls = (programs / "ssh.log").read_text()
    assert secret not in calls
    assert re.search(
        r"^user@localhost .* spmd-tx serve .* --num-processes 2 --local-processes 1 ", calls, re.M
    )
    assert re.search(r"^node-b .* spmd-tx worker --coordinator localhost:\d+ --process-id 1 ", calls, re.M)
    assert re.search(r"^node-c .* --process-id 0 --group teacher ", calls, re.M)


@pytest.mark.slow
def test_one_process_per_gpu_can_be_asked_for(programs, tmp_path):
    options = ("--gpus-per-node", "2", "--process-per", "gpu")
    with launched(programs, tmp_path, *options) as script:
        script.wait_until_ready()
        assert len(script.find(r"spmd-tx worker .*--process-id [23]")) == 2
        assert len(script.find(r"fake_worker.py .*--device-ids")) == 4
        script.process.send_signal(signal.SIGINT)
        code, said = script.end()
        assert code == 0, said


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["spmd-tx worker", "spmd-tx serve"])
def test_what_is_killed_is_started_again(programs, tmp_path, killed):
    with launched(programs, tmp_path, "--gpus-per-node", "1") as script:
        script.wait_until_ready()
        [process] = script.find(killed)
        process.kill()
        while script.find(killed) in ([], [process]):
            time.sleep(0.05)
        script.wait_until_ready()
        script.process.send_signal(signal.SIGTERM)
        code, said = script.end()
        assert code == 0, said
        assert f"{killed.split()[1]} on " in said
        assert "ended with code 137; starting it again" in said


def test_a_server_that_cannot_start_ends_everything_with_its_code(programs, tmp_path):
    with launched(programs, tmp_path, "--gpus-per-node", "1", serve=["--kv-cache-tokens", "1"]) as script:
        code, said = script.end()
    assert code == 2
    assert "--kv-cache-tokens is 1" in said


@pytest.mark.slow
def test_all_ends_with_a_script_that_is_killed(programs, tmp_path):
    with launched(programs, tmp_path, "--gpus-per-node", "1") as script:
        script.wait_until_ready()
        agents = script.find("spmd-tx (worker|serve)")
        assert len(agents) == 2
        for child in psutil.Process(script.process.pid).children():  # the whole script, like a lost terminal
            child.kill()
        script.process.kill()
        until_ended(agents)


@pytest.mark.parametrize(
    "script", sorted(path.name for path in LAUNCH.iterdir() if path.is_file() and path.suffix != ".yaml")
)
def test_scripts_are_valid(script):
    subprocess.run(["bash", "-n", LAUNCH / script], check=True)


# Runs the task of each node here; the nodes of a heterogeneous job are those of its components.
SRUN = """#!/usr/bin/env bash
nodes=($SLURM_JOB_NODELIST ${SLURM_JOB_NODELIST_HET_GROUP_1-} ${SLURM_JOB_NODELIST_HET_GROUP_2-})
while [[ $1 == -* ]]; do echo "srun $1" >> "$(dirname "$0")/srun.log"; shift; done
trap 'kill -TERM $(jobs -p)' TERM
for ((i = 0; i < ${#nodes[@]}; i++)); do
    SLURM_PROCID=$i SLURMD_NODENAME=${nodes[i]} "$@" &
done
wait
wait
"""
# Of many names, the real one writes the last after whoever wants the first only may have ended.
SCONTROL = """#!/usr/bin/env bash
for name in $3; do echo $name; sleep 0.1; done
"""
JOB = {"SLURM_JOB_NODELIST": "node-a node-b"}
HETEROGENEOUS = {
    **JOB,
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node-c node-d",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "node-e",
}
GROUPS = ["--group", "name=teacher,base_model=t", "--group=base_model=j,name=judge"]


@pytest.fixture
def slurm(programs):
    """Run the job script, with programs that only last; gives what has started."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(count, variables, *arguments):
        command = ["env", *(f"{name}={value}" for name, value in variables.items())]
        with lasting(programs, [*command, "bash", LAUNCH / "slurm.sbatch", *arguments], count):
            lines = (programs / "starts.log").read_text().splitlines()
            return sorted(line.partition(" ")[2] for line in lines)

    return run


def test_the_nodes_of_a_job_are_processes_of_one_mesh(slurm):
    assert slurm(2, JOB, "--base-model", "m") == [
        "serve --base-model m --worker-host :: --worker-port 8470 --num-processes 2 --local-processes 1",
        "worker --group main --process-id 1",
    ]


def test_each_component_of_a_heterogeneous_job_is_a_group(slurm, programs):
    server, *workers = slurm(5, HETEROGENEOUS, "--base-model", "m", *GROUPS)
    assert "--group name=teacher,base_model=t,num_processes=2,local_processes=0 " in server
    assert "--group=base_model=j,name=judge,num_processes=1,local_processes=0 " in server
    assert server.endswith("--num-processes 2 --local-processes 1")
    assert workers == [
        "worker --group judge --process-id 0",
        "worker --group main --process-id 1",
        "worker --group teacher --process-id 0",
        "worker --group teacher --process-id 1",
    ]
    assert "srun --het-group=0-2" in (programs / "srun.log").read_text()


def test_workers_of_replicas_have_no_numbers_and_need_no_component(slurm):
    elastic, late = "name=rollouts,role=sample,replicas=4", "name=spot,base_model=s,role=sample,replicas=8"
    options = "--base-model", "m", "--group", elastic, *GROUPS[2:], "--group", late
    server, *workers = slurm(5, HETEROGENEOUS, *options)
    assert f"--group {elastic} " in server
    assert f"--group {late} " in server
    assert (
        workers
        == ["worker --group judge --process-id 0", "worker --group main --process-id 1"]
        + ["worker --group rollouts"] * 2
    )


def test_a_job_needs_a_component_for_each_group(slurm, programs):
    environment = os.environ | HETEROGENEOUS | {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = ["bash", LAUNCH / "slurm.sbatch", "--base-model", "m", *GROUPS[:2]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "the job has 3 components, and 1 --group; give each --group a component" in done.stderr


def test_the_kubernetes_objects_fit_together():
    objects = list(yaml.safe_load_all((LAUNCH / "k8s.yaml").read_text()))
    sets = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "StatefulSet"}
    head, worker = (
        sets[name]["template"]["spec"]["containers"][0] for name in ("spmd-tx-head", "spmd-tx-worker")
    )
    assert head["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert head["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert f"--num-processes={1 + sets['spmd-tx-worker']['replicas']}" in head["args"]
    headless = next(each for each in objects if each["spec"].get("clusterIP") == "None")
    assert headless["spec"]["publishNotReadyAddresses"]
    assert all(each["serviceName"] == headless["metadata"]["name"] for each in sets.values())
    for container in (head, worker):
        assert "SPMD_TX_SECRET" in json.dumps(container["env"])


@pytest.fixture(scope="module")
def kubernetes():
    """All objects by kind and name."""
    objects = [
        each
        for file in ("k8s.yaml", "k8s_group.yaml", "k8s_replicas.yaml")
        for each in yaml.safe_load_all((LAUNCH / file).read_text())
    ]
    return {(each["kind"], each["metadata"]["name"]): each["spec"] for each in objects}


def pods(kubernetes):
    kinds = ("StatefulSet", "Deployment")
    return [spec["template"]["spec"] for (kind, _), spec in kubernetes.items() if kind in kinds]


def test_pods_have_no_rights_that_they_do_not_need(kubernetes):
    for pod in pods(kubernetes):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"]
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
            mounted = {each["name"] for each in container["volumeMounts"]}
            assert "/tmp" in {each["mountPath"] for each in container["volumeMounts"]}
            assert mounted <= {each["name"] for each in pod["volumes"]} | {"state"}


def test_the_database_is_on_a_volume_of_one_pod(kubernetes):
    head = kubernetes["StatefulSet", "spmd-tx-head"]
    (claim,) = head["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    pod = head["template"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        environment = {each["name"]: each.get("value") for each in container["env"]}
        assert environment["SPMD_TX_DATABASE_URL"] == "sqlite:////state/spmd_tx.db"
        assert {"name": claim["metadata"]["name"], "mountPath": "/state"} in container["volumeMounts"]
    worker = kubernetes["StatefulSet", "spmd-tx-worker"]
    assert "state" not in json.dumps(worker["template"])


def test_ports_without_keys_of_their_own_are_for_pods_of_the_server_only(kubernetes):
    mesh, api = kubernetes["NetworkPolicy", "spmd-tx-mesh"], kubernetes["NetworkPolicy", "spmd-tx-api"]
    ours = {"matchLabels": {"app": "spmd-tx"}}
    assert mesh["podSelector"] == ours
    assert mesh["ingress"] == [{"from": [{"podSelector": ours}]}]
    assert [each["ports"] for each in api["ingress"]] == [[{"port": "http"}]]
    for name in ("spmd-tx-head", "spmd-tx-worker", "spmd-tx-teacher"):
        labels = kubernetes["StatefulSet", name]["template"]["metadata"]["labels"]
        assert labels.items() >= ours["matchLabels"].items()
    (head,) = kubernetes["StatefulSet", "spmd-tx-head"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in head["ports"]}
    assert f"--jax-port={ports['jax']}" in head["args"]
    assert f"--worker-port={ports['workers']}" in head["args"]


def test_a_group_has_pods_of_its_own_as_many_as_the_server_is_told(kubernetes):
    (told,) = re.findall(r"^#   - --group=(\S+)$", (LAUNCH / "k8s_group.yaml").read_text(), re.M)
    (config,) = with_groups(ServerConfig(base_model="m"), [read_pairs(told)]).groups
    teacher, worker = (
        kubernetes["StatefulSet", name] for name in (f"spmd-tx-{config.group}", "spmd-tx-worker")
    )
    assert (config.num_processes, config.agents_here) == (teacher["replicas"], 0)
    (container,) = teacher["template"]["spec"]["containers"]
    assert container["args"][0].endswith(f"--group {config.group} --process-id ${{HOSTNAME##*-}}")
    selectors = [each["selector"]["matchLabels"] for each in (teacher, worker)]
    assert [each["role"] for each in selectors] == ["teacher", "worker"]
    for spec, selector in zip((teacher, worker), selectors, strict=True):
        assert spec["template"]["metadata"]["labels"] == selector
    assert teacher["serviceName"] == worker["serviceName"]
    assert container["env"] == worker["template"]["spec"]["containers"][0]["env"]


def test_replicas_are_pods_without_numbers_that_write_into_the_folder_of_their_group_only(kubernetes):
    (told,) = re.findall(r"^#   - --group=(\S+)$", (LAUNCH / "k8s_replicas.yaml").read_text(), re.M)
    group = with_groups(ServerConfig(base_model="m", data_dir=Path("/data")), [read_pairs(told)]).groups[0]
    replicas = kubernetes["Deployment", "spmd-tx-rollouts"]
    pod = replicas["template"]["spec"]
    (container,) = pod["containers"]
    worker = typer.main.get_command(main.app).commands["worker"]
    options = worker.make_context("worker", list(container["args"])).params
    assert (options["group"], options["process_id"]) == (template_of(group.group), None)
    assert pod["terminationGracePeriodSeconds"] > options["leave_seconds"]
    mounted = {each["mountPath"]: each for each in container["volumeMounts"] if each["name"] == "data"}
    assert [path for path, each in mounted.items() if not each.get("readOnly")] == [str(group.template_dir)]
    assert all(path == f"/data/{each['subPath']}" for path, each in mounted.items())
    assert compilation_cache(group).is_relative_to(group.template_dir)
    labels = replicas["template"]["metadata"]["labels"]
    assert labels == replicas["selector"]["matchLabels"]
    joining = kubernetes["NetworkPolicy", "spmd-tx-rollouts-join"]
    (source,) = joining["ingress"][0]["from"]
    assert labels.items() >= source["podSelector"]["matchLabels"].items()
    (head,) = kubernetes["StatefulSet", "spmd-tx-head"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in head["ports"]}
    assert joining["ingress"][0]["ports"] == [{"port": ports["workers"]}]
    mesh = kubernetes["NetworkPolicy", "spmd-tx-mesh"]["podSelector"]["matchLabels"]
    assert labels["app"] != mesh["app"], "nobody else's JAX and NCCL can be reached"


def test_a_freeze_of_a_minute_kills_no_server(kubernetes):
    (head,) = kubernetes["StatefulSet", "spmd-tx-head"]["template"]["spec"]["containers"]
    liveness, startup = head["livenessProbe"], head["startupProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > 90
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600


def test_options_of_the_pods_are_options_of_the_program(kubernetes, monkeypatch):
    (head,) = kubernetes["StatefulSet", "spmd-tx-head"]["template"]["spec"]["containers"]
    for each in head["env"]:
        if "value" in each and each["name"].startswith("SPMD_TX_"):
            monkeypatch.setenv(each["name"], each["value"])
    parsed = typer.main.get_command(main.app).commands["serve"].make_context("serve", list(head["args"]))
    assert parsed.params["data_dir"] == Path("/data")
    assert parsed.params["jax_port"] == 8471


def test_the_first_key_goes_to_a_file_of_the_operator_and_to_no_log(kubernetes, programs, tmp_path):
    (first_key,) = kubernetes["StatefulSet", "spmd-tx-head"]["template"]["spec"]["initContainers"]
    state = tmp_path / "state"
    state.mkdir()

    def inside(text):
        return text.replace("/state", str(state)).replace("/data", str(tmp_path / "data"))

    environment = {each["name"]: inside(each["value"]) for each in first_key["env"]}
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = [*first_key["command"], *map(inside, first_key["args"])]
    for _ in range(2):  # the second start makes no second key
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=True
        )
        assert "tml-" not in done.stdout + done.stderr
    key = state / "first-key"
    assert re.fullmatch(r"tml-[0-9a-f]{48}\n", key.read_text())
    assert key.stat().st_mode & 0o077 == 0


SERVER = """#!/usr/bin/env bash
echo "$*" >> "$(dirname "$0")/starts.log"
if (($(wc -l < "$(dirname "$0")/starts.log") == 1)); then kill -KILL $$; fi
trap 'exit 0' TERM
echo "ready" >&2
while true; do sleep 0.01; done
"""


def test_one_host_starts_a_killed_server_again_and_ends_with_it(tmp_path):
    (tmp_path / "spmd-tx").write_text(SERVER)
    (tmp_path / "spmd-tx").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RESTART_AFTER": "0"}
    command = [LAUNCH / "single_node.sh", "a model", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as script:
        said = script.stderr.readline()
        while (line := script.stderr.readline()) != "ready\n":
            said += line
        script.send_signal(signal.SIGTERM)
        assert script.wait(timeout=30) == 0
    assert "single_node.sh: the server ended with code 137; starting it again" in said
    assert (tmp_path / "starts.log").read_text() == "serve --base-model a model --port 0\n" * 2


def test_one_host_needs_a_model():
    told = subprocess.run([LAUNCH / "single_node.sh"], capture_output=True, text=True)
    assert told.returncode == 2
    assert "Usage: launch/single_node.sh MODEL" in told.stderr

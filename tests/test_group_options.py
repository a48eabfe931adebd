from pathlib import Path

import msgspec
import pytest

from spmd_tx.config import OPTIONS, ServerConfig
from spmd_tx.errors import StartError
from spmd_tx.group_options import INHERITED, OWN, read_pairs, with_groups

SERVER = ServerConfig(
    base_model="/models/student",
    served_model_name="student",
    data_dir=Path("/data"),
    decode_rows=32,
    num_processes=4,
    tensor_parallel_size=2,
)
# Options that describe the server as a whole
OF_SERVER = {
    *("host", "port", "log_format", "insecure_no_auth", "trusted_proxies", "tls_cert", "tls_key"),
    *("data_dir", "checkpoints_base", "database_url", "session_timeout", "drain_seconds"),
    *("worker_host", "worker_port", "secret_file"),
    *("min_free_disk", "keep_results_hours", "keep_versions_hours", "keep_audit_days", "keep_metrics_days"),
    *("max_compilation_cache", "max_checkpoint_cache"),
}


def groups(*texts):
    return with_groups(SERVER, [read_pairs(text) for text in texts]).groups


def test_every_option_is_the_servers_or_a_groups():
    assert sorted([*OF_SERVER, *OWN, *INHERITED]) == sorted(OPTIONS), (
        "put an option into OWN or INHERITED of spmd_tx/group_options.py, or into OF_SERVER of this file"
    )


def test_a_group_has_its_own_model_and_mesh_and_the_servers_other_options():
    (teacher,) = groups("name=teacher,base_model=/models/teacher,page_size=8")
    assert (teacher.group, teacher.base_model, teacher.model_name) == ("teacher", *["/models/teacher"] * 2)
    assert (teacher.num_processes, teacher.tensor_parallel_size) == (1, "auto")
    assert (teacher.decode_rows, teacher.page_size) == (32, 8)
    assert teacher.data_dir == Path("/data")


def test_what_a_group_keeps_for_itself_is_in_a_folder_of_its_name():
    (teacher,) = groups("name=teacher,base_model=m")
    assert teacher.group_dir == Path("/data/groups/teacher")
    assert SERVER.group_dir == Path("/data")


def test_values_of_pairs_have_the_types_of_their_options():
    (teacher,) = groups(
        "name=t,base_model=m,full_parameters=true,tensor_parallel_size=2,expert_parallel_size=auto"
    )
    assert teacher.full_parameters is True
    assert (teacher.tensor_parallel_size, teacher.expert_parallel_size) == (2, "auto")


def test_a_list_of_names_may_have_commas():
    (teacher,) = groups("name=t,served_model_name=a,b,base_model=m")
    assert teacher.model_names == ("a", "b")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("teacher", "has no key"),
        ("base_model=m", "name"),
        ("name=main,base_model=m", "other than main"),
        ("name=../up,base_model=m", "small letters"),
        ("name=t", "groups main and t both train student"),
        ("name=t,base_model=/models/student", "a base model has one training group: give one role = sample"),
        ("name=t,role=sample,dtype=float32", "dtype of t is float32, and of main auto; groups of one base"),
        ("name=t,base_model=m,port=1", "sets port; a group has name, base_model"),
        ("name=t,base_model=m,page_size=large", "sets page_size to 'large'"),
        ("name=t,base_model=m,page_size=0", "group t: --page-size is 0"),
        ("name=t,base_model=m,served_model_name=student", "groups main and t both serve student"),
        ("name=t,base_model=m,replicas=2", "t has replicas and trains; give it role = sample"),
        ("name=t,role=sample,replicas=0", "sets replicas to 0; set it from 1 to 256"),
        ("name=t,role=sample,replicas=many", "sets replicas to 'many'"),
        ("name=t,role=sample,replicas=2,local_processes=1", "replicas join with spmd-tx worker"),
        ("name=t/0,role=sample", "small letters"),
    ],
)
def test_what_cannot_be_is_refused(text, complaint):
    with pytest.raises(StartError, match=complaint):
        groups(text)


def test_a_group_that_only_samples_serves_the_base_model_of_another_with_its_options():
    server = msgspec.structs.replace(SERVER, max_lora_rank=64, batch_invariant=True, dtype="float32")
    texts = "name=rollouts,role=sample,decode_rows=8", "name=more,base_model=/models/student,role=sample"
    for group in with_groups(server, map(read_pairs, texts)).groups:
        assert (group.base_model, group.model_names, group.trains) == ("/models/student", ("student",), False)
        assert (group.max_lora_rank, group.batch_invariant, group.dtype) == (64, True, "float32")
        assert group.tensor_parallel_size == "auto"


def test_the_same_weights_under_another_name_are_another_base_model():
    (frozen,) = groups("name=t,base_model=/models/student,served_model_name=frozen")
    assert frozen.model_names == ("frozen",)


def test_two_groups_of_one_name_are_refused():
    with pytest.raises(StartError, match="two groups are called t"):
        groups("name=t,base_model=a", "name=t,base_model=b")


def test_a_group_with_replicas_is_several_groups_that_are_alike():
    first, second = groups("name=rollouts,role=sample,replicas=2,num_processes=2,decode_rows=8")
    assert (first.group, second.group) == ("rollouts/0", "rollouts/1")
    assert (first.agents_here, first.num_processes, first.decode_rows, first.trains) == (0, 2, 8, False)
    assert msgspec.structs.replace(first, group=second.group) == second
    assert [each.group_dir for each in (first, second)] == [
        Path("/data/groups/rollouts/0"),
        Path("/data/groups/rollouts/1"),
    ]
    assert first.template_dir == second.template_dir == Path("/data/groups/rollouts")


def test_a_name_is_taken_by_a_group_with_replicas():
    with pytest.raises(StartError, match="two groups are called t"):
        groups("name=t,role=sample,replicas=2", "name=t,role=sample")


def test_replicas_have_hosts_of_their_own():
    texts = "name=rollouts,role=sample,replicas=8,num_processes=2", "name=t,base_model=m"
    config = with_groups(SERVER, map(read_pairs, texts))
    assert [group.host_processes for group in config.all_groups] == [5, *[2] * 8, 5]


def test_workers_of_all_groups_share_the_memory_of_their_hosts():
    config = with_groups(SERVER, [read_pairs("name=t,base_model=m,num_processes=2")])
    assert [group.host_processes for group in config.all_groups] == [6, 6]
    assert SERVER.host_processes == 4

from spmd_tx.coordinator.mesh.device_shares import DeviceShares


def test_workers_of_groups_on_one_host_take_devices_beside_each_other():
    shares = DeviceShares()
    assert shares.take("a", ("main", 0), 4) == [0, 1, 2, 3]
    assert shares.take("a", ("teacher", 0), 2) == [4, 5]
    assert shares.take("b", ("teacher", 1), 2) == [0, 1]


def test_a_worker_that_starts_again_takes_the_same_devices():
    shares = DeviceShares()
    shares.take("a", ("main", 0), 2)
    shares.take("a", ("teacher", 0), 2)
    assert shares.take("a", ("main", 0), 2) == [0, 1]
    assert shares.take("a", ("teacher", 0), 2) == [2, 3]


def test_a_worker_that_takes_more_than_before_moves_behind_the_others():
    shares = DeviceShares()
    shares.take("a", ("main", 0), 1)
    shares.take("a", ("teacher", 0), 2)
    assert shares.take("a", ("main", 0), 2) == [3, 4]
    assert shares.take("a", ("judge", 0), 1) == [0], "the gap is free again"


def test_a_host_is_shared_when_two_groups_have_workers_there():
    shares = DeviceShares()
    shares.expect("a", "main")
    shares.expect("a", "main")
    assert not shares.is_shared("a")
    shares.expect("a", "teacher")
    assert shares.is_shared("a")
    assert not shares.is_shared("b")

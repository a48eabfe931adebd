from spmd_tx.coordinator.scheduler.request_table import RequestStatus, RequestTable


def check_integrity(table: RequestTable) -> None:
    """Assert that the table does not contradict itself."""
    for index in (table._by_session, table._by_line):
        indexed = [pair for states in index.values() for pair in states.items()]
        assert len(indexed) == len(table._states)
        assert dict(indexed) == table._states
        assert all(index.values()), "an entry of an index is empty"
    assert table._dangerous == {id: state for id, state in table._states.items() if state.dangers}
    for request_id, state in table._states.items():
        request, status = state.request, state.status
        assert request.id == request_id
        assert request_id in table._by_session[request.session_id]
        assert request_id in table._by_line[request.line]
        assert status is not RequestStatus.ENDED
        assert request.kind != "sample" or state.is_unfinished, f"a sample is {status}"
        assert state.job is None or request.kind == "sample"
        assert bool(state.given_up_because) == (status is RequestStatus.GIVEN_UP)
        assert status is not RequestStatus.GIVEN_UP or not state.dangers, "it does nothing any more"

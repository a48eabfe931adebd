"""Selects training runs for a list, and puts them in an order. Builds queries only."""

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, func, select, true
from sqlalchemy.orm import InstrumentedAttribute

from spmd_tx.coordinator.catalog.listings import SessionFilter
from spmd_tx.coordinator.requests.runs.run_metrics import newest_at
from spmd_tx.coordinator.storage.tables import ModelRow, SessionRow
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.wire.console.runs import RunSort

SEARCH_CHARACTERS = 200  # that a search has at most
COLUMNS: dict[RunSort, ColumnElement[Any] | InstrumentedAttribute[Any]] = {
    "created": ModelRow.created_at,
    "changed": func.coalesce(newest_at(), ModelRow.created_at),
    "group": func.coalesce(ModelRow.run_group, ""),  # databases differ in where they put nulls
    "model": ModelRow.base_model,
    "rank": ModelRow.rank,
    "owner": SessionRow.owner,
}


@dataclass(frozen=True)
class RunQuery:
    """Says which runs a list has, and in which order."""

    beginning: str = ""  # of their IDs
    search: str = ""  # words that a run has somewhere, in any order, in capitals or not
    sort: RunSort = "created"
    is_ascending: bool = False
    has_archived: bool = False  # whether it has archived runs, too, as it does where ``beginning`` is given

    def rows(self, caller: Caller) -> "Select[*tuple[ModelRow, SessionRow]]":
        """Select those that a caller may see.

        The search is left to ``fits``, since databases differ in case and JSON.
        """
        column = COLUMNS[self.sort]
        order = column.asc() if self.is_ascending else column.desc()
        begins = ModelRow.id.startswith(self.beginning) if self.beginning else true()
        is_listed = true() if self.has_archived or self.beginning else ModelRow.archived_at.is_(None)
        return (
            select(ModelRow, SessionRow)
            .join(SessionRow, SessionRow.id == ModelRow.session_id)
            .where(SessionFilter().of(caller), begins, is_listed)
            .order_by(order, ModelRow.created_at.desc(), ModelRow.id)
        )

    def fits(self, model: ModelRow, session: SessionRow) -> bool:
        """Return whether each word of the search is in what a run says of itself.

        That is its ID, names, group, tags, metadata, base model and owner.
        """
        words = self.search.casefold().split()
        if not words:
            return True
        labels = [label or "" for label in (model.name, model.run_group, session.display_name)]
        parts = [model.id, model.base_model, session.owner, *labels, *session.tags]
        metadata = model.user_metadata or session.user_metadata
        text = " ".join([*parts, json.dumps(metadata or {}, ensure_ascii=False)]).casefold()
        return all(word in text for word in words)

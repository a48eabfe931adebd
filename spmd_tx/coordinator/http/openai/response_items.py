"""Writes what a model has replied as an answer of OpenAI's Responses. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec
from msgspec import UNSET

from spmd_tx.coordinator.http.openai import response_schemas as schemas
from spmd_tx.coordinator.http.text_generation.generation import TokenUsage
from spmd_tx.coordinator.http.text_generation.replies import NumberedCall, ReplyPart
from spmd_tx.coordinator.text.reply_events import Reasoning, ReplyContent

ANSWER_ID = "resp_"  # begins the id of an answer


@dataclass(frozen=True)
class ResponseHead:
    """Holds what is known of an answer before it is drawn."""

    request_id: str
    created_at: int  # seconds since the epoch
    seal: str  # of the turn
    places: Mapping[str, tuple[str, str]]  # namespace and name of tools in namespaces
    request: schemas.ResponsesRequest

    def answer(self) -> schemas.ResponseAnswer:
        """Return an answer that is still to be drawn."""
        request = self.request
        return schemas.ResponseAnswer(
            id=f"{ANSWER_ID}{self.request_id}",
            created_at=self.created_at,
            status="in_progress",
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            model=request.model,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            store=request.store is not False,
            temperature=request.temperature,
            tool_choice=request.tool_choice if isinstance(request.tool_choice, str) else "auto",
            tools=request.tools or (),
            top_p=request.top_p,
        )

    def ended(
        self, items: Sequence[schemas.OutputItem], finish: str, usage: TokenUsage
    ) -> schemas.ResponseAnswer:
        """Return an answer that is drawn."""
        is_cut = finish == "length"
        return msgspec.structs.replace(
            self.answer(),
            status="incomplete" if is_cut else "completed",
            incomplete_details=schemas.IncompleteDetails() if is_cut else None,
            output=items,
            usage=_usage(usage),
        )

    def item(self, part: ReplyPart, number: int) -> schemas.OutputItem:
        """Return the item of a whole part, which is the item with this number."""
        id = f"{self.request_id}_{number}"
        match part:
            case Reasoning():
                return schemas.ReasoningItem(f"rs_{id}", [schemas.SummaryText(part.text)], self.seal)
            case ReplyContent():
                return schemas.MessageItem(f"msg_{id}", [schemas.OutputText(part.text)], "completed")
            case NumberedCall():
                space, name = self.places.get(part.call.name, (UNSET, part.call.name))
                return schemas.FunctionCallItem(
                    f"fc_{id}", part.id, name, part.call.arguments, "completed", namespace=space
                )
            case _:
                assert_never(part)


def _usage(spent: TokenUsage) -> schemas.ResponseUsage:
    return schemas.ResponseUsage(
        spent.prompt,
        schemas.InputTokensDetails(spent.cached),
        spent.sampled,
        schemas.OutputTokensDetails(spent.reasoning),
        spent.prompt + spent.sampled,
    )

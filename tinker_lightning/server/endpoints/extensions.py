"""Extensions of the protocol, listed in the server capabilities. Standard endpoints are not affected."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.routing import Route

from tinker_lightning.server.bodies import MAX_BODY_BYTES, read
from tinker_lightning.server.endpoints import sampling, trainer_of, training
from tinker_lightning.server.endpoints.futures import Submission, result_endpoint
from tinker_lightning.server.http import answer
from tinker_lightning.types.requests import ImportAdapterRequest
from tinker_lightning.types.responses import FutureResponse

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from tinker_lightning.server.engine.interface import BaseModel

# The names of the extensions in get_server_capabilities.
NAMES = (
    "counted_logprobs",
    "import_adapter",
    "retained_forwards",
    "server_losses",
    "submit_and_wait",
    "tokenizer_files",
)


async def tokenizer(request: Request) -> Response:
    """Returns the tokenizer files of a base model, for clients on other machines."""
    base = await run_in_threadpool(trainer_of(request).catalog.get, request.query_params.get("model", ""))
    return answer({"files": await run_in_threadpool(_tokenizer_files, base)})


def _tokenizer_files(base: BaseModel) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        base.tokenizer.save_pretrained(folder)
        return {file.name: base64.b64encode(file.read_bytes()).decode() for file in Path(folder).iterdir()}


async def import_adapter(request: Request) -> Submission:
    body = await read(request, ImportAdapterRequest, MAX_BODY_BYTES)
    job = trainer_of(request).training.import_adapter(body)
    return Submission(job, FutureResponse(job.request_id))


_submissions = {
    **training.submissions,
    **training.extensions,
    **sampling.submissions,
    "/import_adapter": import_adapter,
}
routes = [
    Route("/tokenizer", tokenizer, methods=["GET"]),
    # Submissions that respond with the result, which takes one round trip instead of two.
    *(Route(path, result_endpoint(submit), methods=["POST"]) for path, submit in _submissions.items()),
    *training.loss_routes,
]

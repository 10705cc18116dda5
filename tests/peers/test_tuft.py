"""Our client and `Trainer.fit` on a real TuFT 0.2.2 server with its transformers backend. Run it with `tox -e tuft`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.peer_suite import BATCH, GRADIENTS, PeerSuite, Server, response
from tests.helpers.real_servers import tuft, write_tiny_qwen
from tinker_lightning.errors import InvalidMessage, NotFound, TinkerLightningError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinker_lightning.client import TrainingClient

# The packages of this environment warn of each other.
pytestmark = pytest.mark.filterwarnings("default")

KEY = "tml-test-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with tuft(write_tiny_qwen(tmp_path_factory.mktemp("model")), "tiny", KEY) as url:
        yield Server(url, "tiny", step=30_000.0, learning_rate=1e-2, api_key=KEY)


class TestTuFT(PeerSuite):
    def send_alone(self, client: TrainingClient, server: Server, i: int) -> None:  # noqa: ARG002
        """Sends one datum by TuFT's `importance_sampling`, which is a plain sum; custom losses use `cross_entropy`."""
        known = client.forward([BATCH[i]], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
        inputs = {"target_tokens": BATCH[i].loss_fn_inputs["target_tokens"], "logprobs": known}
        datum = BATCH[i].with_only_inputs(inputs).with_inputs(advantages=-GRADIENTS[i])
        client.forward_backward([datum], "importance_sampling").result()

    def test_gradients_are_clipped(self, client: TrainingClient, server: Server) -> None:
        start = client.save_state("clipping").result().path
        whole, clipped = (
            response(client, server.params(norm), start, lambda: client.forward_backward(BATCH, "cross_entropy"))
            for norm in (0.0, 1e-3)
        )
        assert np.abs(clipped).max() < 0.1 * np.abs(whole).max()

    def test_a_rejected_request_leaves_its_number_to_the_next(self, client: TrainingClient) -> None:
        with pytest.raises(TinkerLightningError):
            client.forward_backward(BATCH, "no_such_loss").result()
        client.forward(BATCH, "cross_entropy").result()

    def test_states_are_deleted_and_missing_ones_named(self, client: TrainingClient) -> None:
        path = client.save_state("deleted").result().path
        assert client.checkpoint_exists(path)
        client.delete_checkpoint(path)
        assert not client.checkpoint_exists(path)
        with pytest.raises(NotFound):
            client.load_state(path).result()

    def test_an_export_that_stays_on_the_server_names_its_folder(self, client: TrainingClient, tmp_path: Path) -> None:
        with pytest.raises(InvalidMessage, match=r"the server keeps this checkpoint at file:///.*; copy it"):
            client.export_adapter(tmp_path / "adapter")

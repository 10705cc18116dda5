"""Test utilities: a real trainer in the same process, imitations of other servers, and transports with faults.

@pytest.fixture
def service():
    with tinker_lightning.testing.embedded_service() as service:
        yield service
"""

from tinker_lightning.testing.embedded_service import embedded_service
from tinker_lightning.testing.imitations import Behaviour, Imitation, imitate
from tinker_lightning.testing.transports import Fault, FaultyTransport, RecordedRequest, RecordingTransport

__all__ = [
    "Behaviour",
    "Fault",
    "FaultyTransport",
    "Imitation",
    "RecordedRequest",
    "RecordingTransport",
    "embedded_service",
    "imitate",
]

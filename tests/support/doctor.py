"""What the doctor sees on a machine where nothing is wrong."""

from __future__ import annotations

from p2p.sandbox import Containment
from p2p.sandbox.confinement import Mechanism
from roles.doctor.asking import Answer
from roles.doctor.sighting import Need, Sighting, Torch
from roles.engines.config import GIB
from roles.engines.hardware import Gpu
from tests.support.runs import RUN

CARD = Gpu("NVIDIA H100 80GB HBM3", 79 * GIB)
NEED = Need(name="ours", memory=4 * GIB, disk=6 * GIB, expiry=2e9, id=RUN.id)
SOUND = Sighting(
    torch=Torch("2.13.0", (CARD,)), cards=(CARD,), memory=64 * GIB, folder="/data",
    disk=100 * GIB, now=1.9e9, newest=1.8e9, need=NEED,
    sandbox=Containment(mechanism=Mechanism.BUBBLEWRAP, program="bwrap"),
    answers=(Answer(addr="/a", run=RUN, observed="192.0.2.1", local="192.0.2.1",
                    skew=0.1),), port=4001,
)  # fmt: skip

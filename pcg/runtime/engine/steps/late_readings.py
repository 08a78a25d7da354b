"""Late readings: numbers of jobs that the host reads once it has read the step that computed them.

Where the device runs ahead, the host prepares step n+1 while step n runs. A job that waited there
for its loss would have the host wait for the device, and the device then for the host. So the job
stands still until step n is read, when its numbers are there, too:

    host      start n+1 · read n · jobs go on by the numbers of n · parts n+1 · start n+2 · …

What the job does with them, an update and a new version, is what it is without this.
"""

from __future__ import annotations

from pcg.runtime.training.work_units import Reading


class LateReadings:
    """Tells which readings have to wait for the step that is under way.

    Attributes:
        begun: number of steps so far that are read late.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._read = 0

    def begin(self) -> None:
        """Note that a step begins which is read late."""
        self.begun += 1

    def read(self, number: int) -> None:
        """Note that the step of this number was read."""
        self._read = max(self._read, number)

    def give_up(self) -> None:
        """Have nothing wait, as a step failed: what is read next may say why."""
        self._read = self.begun

    def hold(self, reading: Reading) -> bool:
        """Return True if a reading has to wait."""
        if reading.step is None:
            reading.step = self.begun
        return reading.step > self._read

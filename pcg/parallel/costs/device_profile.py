"""Measurements of a device, and costs from them.

A measured shape costs its measured time. Another shape costs its roofline, times the slowness of
the nearest measured shapes of the same kernel and dtype relative to their rooflines:

    seconds(w) = roofline(w) · exp Σ_i c_i log(seconds_i / roofline(w_i)),    c_i ∝ 1 / d(w, w_i)²

over the four nearest points, d being the distance of the logarithms of rows, bytes and operations.
The roofline's peaks are the best measured rates, its launch the shortest time. A kernel without a
point has no cost. Links have α and β by least squares of relative errors:

    minimize Σ_i ((a_i α + b_i / β - t_i) / t_i)²,   a = rounds · (n - 1),   b = a · size / n
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

from pcg.errors import CostModelError
from pcg.files import json_object, read_text
from pcg.parallel.costs.accelerators import Achieved, DeviceSheet, Link
from pcg.parallel.costs.cost_model import CostModel, ring_seconds, roofline_seconds
from pcg.parallel.costs.work import Work
from pcg.units import shown

FORMAT = 2
"""The file's format version; other versions are refused."""

NEAREST = 4
"""Number of measured points for the estimate of another shape."""

_ALL = Achieved(1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True)
class OperatorTime:
    """A measured operator: the work and the seconds of a call."""

    work: Work
    seconds: float


@dataclass(frozen=True)
class CollectiveTime:
    """A measured collective; `size_bytes` is as in `CostModel.collective_seconds`."""

    kind: str
    size_bytes: int
    degree: int
    seconds: float


@dataclass(frozen=True)
class DeviceProfile:
    """Measurements of a device, with the versions of pcg and torch that measured them.

    `exchanges` are times of collectives over a backend of torch.distributed; empty for one rank.
    """

    device: str
    versions: Mapping[str, str]
    points: tuple[OperatorTime, ...]
    exchanges: tuple[CollectiveTime, ...] = ()
    backend: str = ""

    @cached_property
    def sheet(self) -> DeviceSheet:
        products: dict[str, float] = {}
        vectors: dict[str, float] = {}
        for point in self.points:
            work = point.work
            dtype = work.dtype if work.is_product or work.dtype == "f64" else "f32"
            peaks = products if work.is_product else vectors
            peaks[dtype] = max(peaks.get(dtype, 0.0), work.flops / point.seconds)
        bytes_per_s = max(point.work.moved_bytes / point.seconds for point in self.points)
        launch_s = min(point.seconds for point in self.points)
        return DeviceSheet(
            products,
            vectors,
            bytes_per_s,
            launch_s=launch_s,
            links={},
            source="measured",
            launch_source="measured",
        )

    @cached_property
    def tiers(self) -> Mapping[int, Mapping[str, Link]]:
        """The link of each kind of collective, by the measured number of ranks."""
        by_degree: dict[int, dict[str, list[CollectiveTime]]] = {}
        for point in sorted(self.exchanges, key=lambda exchange: (exchange.degree, exchange.kind)):
            by_degree.setdefault(point.degree, {}).setdefault(point.kind, []).append(point)
        return {
            degree: {kind: fitted_link(times, self.backend) for kind, times in kinds.items()}
            for degree, kinds in by_degree.items()
        }

    @property
    def links(self) -> Mapping[str, Link]:
        """The link of each kind of collective, over all measured ranks."""
        return self.tiers.get(self.degree, {})

    @property
    def degree(self) -> int:
        """The most ranks of measured collectives; 1 without any."""
        return max((exchange.degree for exchange in self.exchanges), default=1)

    @property
    def text(self) -> str:
        """The profile as JSON, one line per measurement."""
        head = {
            "format": FORMAT,
            "device": self.device,
            "versions": dict(self.versions),
            "backend": self.backend,
        }
        lines = [f'  "{key}": {json.dumps(value)}' for key, value in head.items()]
        points = [{**asdict(point.work), "seconds": point.seconds} for point in self.points]
        for key, rows in (("points", points), ("exchanges", map(asdict, self.exchanges))):
            text = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in rows)
            lines.append(f'  "{key}": [\n{text}\n  ]' if text else f'  "{key}": []')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def save(self, path: Path) -> None:
        """Write it to a file, safely against concurrent writers."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        beside.write_text(self.text, encoding="utf-8")
        beside.replace(path)

    @classmethod
    def load(cls, path: Path) -> DeviceProfile:
        """Read a saved profile; CostModelError for another kind of file or another version."""
        fix = f"make it again with pcg profile -o {path}"
        return cls.read(read_text(path, CostModelError, f"; {fix}"), path)

    @classmethod
    def read(cls, text: str, path: Path) -> DeviceProfile:
        """Parse the text of a profile; errors as in `load`."""
        fix = f"make it again with pcg profile -o {path}"
        fields = json_object(text, str(path), CostModelError, f"; {fix}")
        try:
            if fields["format"] != FORMAT:
                raise CostModelError(
                    f"{path} is a profile of format {fields['format']}, not {FORMAT}; {fix}"
                )
            rows = [dict(row) for row in fields["points"]]
            points = tuple(
                OperatorTime(seconds=row.pop("seconds"), work=Work(**row)) for row in rows
            )
            exchanges = tuple(CollectiveTime(**row) for row in fields["exchanges"])
            if not points or min([p.seconds for p in points] + [e.seconds for e in exchanges]) <= 0:
                raise ValueError("no points, or one of no time")
            return cls(fields["device"], fields["versions"], points, exchanges, fields["backend"])
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {shown(str(error), 200)}"
            raise CostModelError(f"{path} is no profile ({why}); {fix}") from None


def fitted_link(exchanges: Sequence[CollectiveTime], backend: str) -> Link:
    """Return the link whose α and β minimize the errors above, both at least 0."""
    rows = []
    for exchange in exchanges:
        steps = ring_seconds(exchange.kind, 0, exchange.degree, Link(1.0, 1.0, ""))
        sent = steps * exchange.size_bytes / exchange.degree
        rows.append((steps / exchange.seconds, sent / exchange.seconds))
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(r[i] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    latency, per_byte = 0.0, 0.0
    if determinant > 1e-9 * aa * bb:  # at least two sizes
        latency, per_byte = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if latency <= 0 or per_byte <= 0:
        # Keep the better fit of α or β alone: a²/aa and b²/bb are the explained squares.
        only_bytes = bb > 0 and b * b / bb >= a * a / aa
        latency, per_byte = (0.0, b / bb) if only_bytes else (a / aa, 0.0)
    speed = 1 / per_byte if per_byte else math.inf
    return Link(latency, speed, f"measured over {backend}", is_measured=True)


class ProfileModel(CostModel):
    """Costs from a profile."""

    def __init__(self, profile: DeviceProfile) -> None:
        super().__init__(profile.device)
        self.profile = profile
        self._exact = {_exactly(point.work): point.seconds for point in profile.points}
        self._near: dict[tuple[str, str], list[tuple[tuple[float, ...], float]]] = {}
        for point in profile.points:
            slowness = math.log(point.seconds / self._roofline(point.work))
            where = (point.work.kernel, point.work.dtype)
            self._near.setdefault(where, []).append((_place(point.work), slowness))

    def work_seconds(self, work: Work) -> float:
        exact = self._exact.get(_exactly(work))
        if exact is not None:
            return exact
        points = self._near.get((work.kernel, work.dtype))
        if points is None:
            raise CostModelError(self._refusal(work))
        here = _place(work)
        nearest = sorted((math.dist(here, place), slowness) for place, slowness in points)[:NEAREST]
        if nearest[0][0] == 0.0:
            slowness = nearest[0][1]
        else:
            weights = [1 / distance**2 for distance, _ in nearest]
            neighbours = zip(weights, nearest, strict=True)
            slowness = sum(w * s for w, (_, s) in neighbours) / sum(weights)
        return self._roofline(work) * math.exp(slowness)

    def _roofline(self, work: Work) -> float:
        return roofline_seconds(work, self.profile.sheet, _ALL, self.name)

    def _link(self, kind: str, degree: int) -> Link:
        profile = self.profile
        for ranks, links in profile.tiers.items():
            if degree <= ranks and kind in links:
                return links[kind]
        have = f"collectives of {profile.degree} ranks" if profile.exchanges else "no link"
        raise CostModelError(
            f"the profile of {self.name} has {have}, so {kind} over {degree} has no cost; measure "
            f"with pcg profile --tp {degree} -o FILE"
        )

    def _refusal(self, work: Work) -> str:
        dtypes = sorted(dtype for kernel, dtype in self._near if kernel == work.kernel)
        what = f"{work.kernel} in {work.dtype} was not measured on {self.name}"
        if dtypes:
            return f"{what}, only in {', '.join(dtypes)}; pcg profile --dtype measures others"
        close = get_close_matches(work.kernel, {kernel for kernel, _ in self._near}, 2)
        hint = f" (measured are {' and '.join(close)})" if close else ""
        return f"{what}{hint}; pcg profile -o FILE measures all operators that it can run"


def _exactly(work: Work) -> tuple[str, str]:
    return work.kernel, work.shapes


def _place(work: Work) -> tuple[float, ...]:
    return math.log(work.rows), math.log(work.moved_bytes), math.log(1 + work.flops)

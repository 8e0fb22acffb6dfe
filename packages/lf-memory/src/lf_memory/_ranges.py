"""The books of a variable pool: ranges of pages in extents that come and go."""

from collections.abc import Iterable

from ._best_fit import BestFit, Range
from ._lease import Lease
from ._region import PAGE, Region, round_up
from ._slots import SlotTable, slot_type
from ._trace import Tracer, poison


class RangeTable(SlotTable):
    """Ranges instead of slots; the index of a range is its first page.

    As there, `_busy` alone says what is out: an interrupted change leaves `_fit` marked stale, and it is made
    again from `_busy`, `_asked` and `_extents`.
    """

    noun = "range"

    def __init__(self, region: Region, tracer: Tracer | None) -> None:
        super().__init__(region, 0, PAGE, PAGE, None)
        self.tracer = tracer
        self._plain = False
        self._size = region.size // PAGE
        self._extents: dict[int, int] = {}  # first page -> pages, backed by memory
        self._fit = BestFit()
        self._stale = False
        self._asked: dict[int, int] = {}  # bytes of the range that starts at a page

    def take_bytes(self, nbytes: int) -> Lease | None:
        """The tightest range that holds `nbytes`, or None."""
        with self._lock:
            if not self._returned.empty():
                self._settle()
            if self._fenced:
                self._sweep()
            index = self._find(nbytes)
            if index is None:
                self._recover()
                index = self._find(nbytes)
                if index is None:
                    return None
            self._asked[index] = nbytes
            if self.tracer is not None:
                self._check_poison(index, self.tracer)
                self.tracer.note("acquire", index)
            memory = slot_type(nbytes).from_address(self.base + index * PAGE)
            self._busy[index] = self._watch(index, memory)
            self._stale = False
            self.acquires += 1
            self.peak = max(self.peak, sum(self._extents.values()) - self._fit.free)
            return Lease(self, index, memory)

    def usage(self) -> tuple[int, int, BestFit]:
        """Bytes asked for by ranges that are out, bytes they take, and the holes."""
        with self._lock:
            self._settle()
            self._sweep()
            asked = [self._asked[index] for index in self._busy]
            return sum(asked), sum(map(self.span, asked)) * PAGE, self._holes()

    def span(self, nbytes: int) -> int:
        """Pages that a range of `nbytes` takes."""
        return round_up(nbytes, PAGE) // PAGE

    @property
    def extents(self) -> tuple[Range, ...]:
        """(first page, pages) of each extent."""
        return tuple(self._extents.items())

    def fits(self, nbytes: int) -> bool:
        """Whether a hole holds `nbytes` now."""
        return self.usage()[2].largest >= self.span(nbytes)

    def gap(self, pages: int, without: Iterable[Range] = ()) -> int | None:
        """Where an extent of `pages` may lie, or might if some extents were gone."""
        left = set(self.extents) - set(without)
        return BestFit.around([(0, self._size)], left).take(pages)

    def add_extent(self, start: int, pages: int) -> None:
        """Allocate from these pages too; memory backs them."""
        with self._lock:
            if self.tracer is not None:
                poison(self._bytes(start * PAGE, pages * PAGE))
            self._extents[start] = pages
            self._stale = True
        if self.line:
            self._note_returned(None)

    def unused(self) -> tuple[Range, ...]:
        """Extents of which nothing is out."""
        holes = set(self.usage()[2].holes)
        return tuple(extent for extent in self.extents if extent in holes)

    def drop(self, extent: Range) -> bool:
        """Allocate from an extent no longer; False if something of it is out by now."""
        with self._lock:
            if extent not in self._holes().holes:
                return False
            self._stale = True
            del self._extents[extent[0]]
            return True

    def nbytes(self, index: int) -> int:
        """See SlotTable."""
        return self._asked[index]

    def _reach(self, index: int) -> int:
        return self.span(self._asked[index]) * PAGE

    def _find(self, nbytes: int) -> int | None:
        fit = self._holes()
        self._stale = True  # until the range is in `_busy`
        index = fit.take(self.span(nbytes))
        self._stale = index is not None
        return index

    def _holes(self, freed: int | None = None) -> BestFit:
        """The holes; without the range that is being freed and so is no longer in `_busy`."""
        if self._stale:
            out = [*self._busy] if freed is None else [*self._busy, freed]
            live = ((index, self.span(self._asked[index])) for index in out)
            self._fit = BestFit.around(self._extents.items(), live)
            self._stale = False
        return self._fit

    def _put_free(self, index: int) -> None:
        fit, self._stale = self._holes(index), True
        fit.give(index, self.span(self._asked[index]))
        self._stale = False

    def _recover(self) -> None:
        for index, watch in list(self._busy.items()):
            if index not in self._fenced and watch() is None:
                self._take_back(watch, "collect")
        self._stale = True  # a range that was freed halfway is found by looking at what is out

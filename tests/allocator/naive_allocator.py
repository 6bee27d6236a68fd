"""The caching allocator once more, as slow and as plain as can be: the rules read again, and none of the fast model.

A segment is a list of cells. Every question is answered by looking at all of them; after every change the neighbours
that are alike are joined by one pass over everything. Nothing is kept sorted, nothing is linked.
"""

from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20
USED, FREE, UNMAPPED = "active_allocated", "inactive", "unmapped"


@dataclass(eq=False)
class Cell:
    address: int
    size: int
    state: str


@dataclass(eq=False)
class Range:
    small: bool
    stream: int
    cells: list
    page: int | None


class NoRoom(Exception):
    pass


@dataclass(eq=False)
class NaiveAllocator:
    """``conf`` has the options of PYTORCH_CUDA_ALLOC_CONF by name, those that are set."""

    capacity: int | None
    conf: dict
    addresses: object
    ranges: list = field(default_factory=list)
    retries: int = 0

    def cells(self, *states):
        return [(place, cell) for place in self.ranges for cell in place.cells if cell.state in states]

    @property
    def allocated(self):
        return sum(cell.size for _, cell in self.cells(USED))

    @property
    def reserved(self):
        return sum(cell.size for _, cell in self.cells(USED, FREE))

    @property
    def allowed(self):
        fraction = self.conf.get("per_process_memory_fraction", 1)
        return int(self.capacity * fraction) if fraction < 1 and self.capacity is not None else None

    def rounded(self, asked):
        interval = 0
        while asked >= MIB << (interval + 1) and interval < 15:
            interval += 1
        divisions = self.conf.get("roundup_power2_divisions", [0] * 16)[interval]
        if divisions > 1 and asked > 512 * divisions:
            power = 1
            while power * 2 <= asked:
                power *= 2
            size = power
            while size < asked:
                size += power // divisions
            return size
        size = 512
        while size < asked and size < 64 * KIB:
            size += 512
        return size if size >= asked else (asked + 511) // 512 * 512

    def segment_for(self, size):
        if size <= MIB:
            return 2 * MIB
        if size < 10 * MIB:
            return self.conf.get("large_segment_size_mb", 20) * MIB
        return (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB

    def malloc(self, asked, stream):
        size = self.rounded(asked)
        small = size <= MIB
        found = self.search(small, stream, size) or self.more(small, stream, size)
        place, cell = found
        rest = cell.size - size
        to_the_last = small or self.conf.get("expandable_segments")
        if rest >= 512 if to_the_last else rest > MIB and size < self.oversize:
            place.cells.insert(place.cells.index(cell) + 1, Cell(cell.address + size, rest, FREE))
            cell.size = size
        cell.state = USED
        return cell

    @property
    def oversize(self):
        return self.conf.get("max_split_size_mb", 1 << 40) * MIB

    def search(self, small, stream, size):
        fits = [
            (place, cell)
            for place, cell in self.cells(FREE)
            if (place.small, place.stream) == (small, stream) and cell.size >= size
        ]
        fits.sort(key=lambda found: (found[1].size, found[1].address))
        if self.conf.get("expandable_segments"):
            while len(fits) > 1 and fits[0][0].page and self.reach(*fits[1]) < self.reach(*fits[0]):
                fits.pop(0)
        if not fits:
            return None
        held = fits[0][1].size
        if size < self.oversize and held >= self.oversize:
            return None
        rounding = self.conf.get("max_non_split_rounding_mb", self.conf.get("large_segment_size_mb", 20)) * MIB
        if size >= self.oversize and held >= size + rounding:
            return None
        return fits[0]

    def reach(self, place, cell):
        after = place.cells[place.cells.index(cell) + 1 :][:1]
        return cell.size + sum(one.size for one in after if one.state == UNMAPPED)

    def more(self, small, stream, size):
        found = self.fresh(small, stream, size)
        if not found and "max_split_size_mb" in self.conf and self.drop_oversize(small, stream, size):
            found = self.fresh(small, stream, size)
        if not found:
            self.retries += 1
            self.empty_cache()
            found = self.fresh(small, stream, size)
        if not found:
            raise NoRoom
        return found

    def fresh(self, small, stream, size):
        segment = self.segment_for(size)
        if self.allowed is not None and self.reserved + segment > self.allowed:
            return None
        if self.conf.get("expandable_segments"):
            return self.grow(small, stream, size)
        if not self.granted(segment):
            return None
        place = Range(small, stream, [Cell(next(self.addresses), segment, FREE)], None)
        self.ranges.append(place)
        return place, place.cells[0]

    def granted(self, nbytes):
        return self.capacity is None or self.reserved + nbytes <= self.capacity

    def grow(self, small, stream, size):
        page = 2 * MIB if small else self.conf.get("large_segment_size_mb", 20) * MIB
        for place in sorted(self.ranges, key=lambda one: one.cells[0].address):
            if place.page is None or (place.small, place.stream) != (small, stream):
                continue
            for index, cell in enumerate(place.cells):
                if cell.state != UNMAPPED:
                    continue
                first = index - 1 if index and place.cells[index - 1].state == FREE else index
                if self.room_from(place, first) >= size:
                    return self.fill(place, place.cells[first].address, size)
        device = (1 << 39) if self.capacity is None else self.capacity
        space = (device + device // 8 + page - 1) // page * page
        if space < size:
            return None
        place = Range(small, stream, [Cell(next(self.addresses), space, UNMAPPED)], page)
        self.ranges.append(place)
        return self.fill(place, place.cells[0].address, size)

    def room_from(self, place, index):
        room = 0
        for cell in place.cells[index:]:
            if cell.state not in (FREE, UNMAPPED):
                break
            room += cell.size
        return room

    def fill(self, place, start, size):
        """Map hole after hole until the free cell at ``start`` holds ``size``."""
        while True:
            at = next(
                index for index, cell in enumerate(place.cells) if cell.address <= start < cell.address + cell.size
            )
            cell = place.cells[at]
            if cell.state == FREE and cell.size >= size:
                return place, cell
            hole = cell if cell.state == UNMAPPED else place.cells[at + 1]
            lacking = min(hole.size, size if hole is cell else size - cell.size)
            mapped = (lacking + place.page - 1) // place.page * place.page
            if not self.granted(mapped):
                return None
            if mapped < hole.size:
                behind = Cell(hole.address + mapped, hole.size - mapped, UNMAPPED)
                place.cells.insert(place.cells.index(hole) + 1, behind)
            hole.size, hole.state = mapped, FREE
            self.join()

    def free(self, cell):
        cell.state = FREE
        self.join()

    def empty_cache(self):
        for place in list(self.ranges):
            if place.page is None:
                if [cell.state for cell in place.cells] == [FREE]:
                    self.ranges.remove(place)
                continue
            touched = False
            base = place.cells[0].address
            for cell in [cell for cell in place.cells if cell.state == FREE]:
                touched = True
                first = base + (cell.address - base + place.page - 1) // place.page * place.page
                last = base + (cell.address + cell.size - base) // place.page * place.page
                if first < last:
                    parts = [
                        Cell(cell.address, first - cell.address, FREE),
                        Cell(first, last - first, UNMAPPED),
                        Cell(last, cell.address + cell.size - last, FREE),
                    ]
                    at = place.cells.index(cell)
                    place.cells[at : at + 1] = [part for part in parts if part.size]
            self.join()
            if touched and [cell.state for cell in place.cells] == [UNMAPPED]:
                self.ranges.remove(place)

    def join(self):
        for place in self.ranges:
            joined = []
            for cell in place.cells:
                if joined and cell.state in (FREE, UNMAPPED) and joined[-1].state == cell.state:
                    joined[-1].size += cell.size
                else:
                    joined.append(cell)
            place.cells = joined

    def drop_oversize(self, small, stream, size):
        wanted = max(size, self.oversize)
        cells = [
            (cell.size, cell.address, place)
            for place, cell in self.cells(FREE)
            if (place.small, place.stream) == (small, stream) and cell.size >= self.oversize
        ]
        large = sorted(one for one in cells if one[0] >= wanted)
        if large and large[0][2].page is None:
            self.ranges.remove(large[0][2])
            return True
        dropped = 0
        for held, _, place in sorted((one for one in cells if one[0] < wanted), reverse=True):
            if dropped < wanted and place.page is None:
                self.ranges.remove(place)
                dropped += held
        return dropped >= wanted

"""The host guard: host memory that is about to run out becomes a ``MemoryError`` at the line that asks for it.

Three mechanisms, each for what the one before it cannot see. The kernel *refuses* what would not fit (``refusal``). A
signal *interrupts* the cell where memory that was mapped before is touched (``interrupt``). A *record* outlives a
kernel that was killed all the same (``black_box``). ``watch`` has the thread that looks, ``gauge`` what it looks at.
"""

"""The live objects as one graph: what each kind of object holds, one bounded walk, paths, storages, frames."""

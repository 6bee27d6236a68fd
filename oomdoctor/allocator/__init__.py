"""The model of the CUDA caching allocator, and the virtual accelerator that is built on it."""

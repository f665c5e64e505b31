"""Parts of the GPU suite."""

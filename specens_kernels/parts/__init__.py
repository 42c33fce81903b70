"""What several operations share, most of it for Triton. It computes, and launches nothing but through `launches`."""

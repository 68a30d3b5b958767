"""One module per wire protocol: it reads a request, and writes a turn, a stream and an error in its shape."""

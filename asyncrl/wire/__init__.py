"""The wire: messages, their bytes, and the sockets that carry them."""

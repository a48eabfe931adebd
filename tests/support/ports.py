import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Find a port that is free now."""
    with socket.create_server((host, 0)) as taken:
        return taken.getsockname()[1]

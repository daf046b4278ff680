"""The command ``shoal``, which Ctrl-C ends while it imports, too."""


def main() -> int:
    """Run ``shoal COMMAND ...``; the exit code."""
    try:
        from p2p.node.commands import main as command
    except KeyboardInterrupt:
        return 130
    return command()

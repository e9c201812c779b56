"""As `private_ray_script`, but of a process that shares its imports with its workers."""

from __future__ import annotations

from hotcold.actors.private_ray.shared_imports import share_imports


def main() -> None:
    """See `tests.actors.private_ray_script.main`."""
    with open(__file__):  # a file that the fork server must not keep open
        share_imports("hotcold.actors.launch")
    from tests.actors import private_ray_script

    private_ray_script.main()


if __name__ == "__main__":
    main()

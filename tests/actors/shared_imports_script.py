"""As `private_ray_script`, but of a process that shares its imports with its workers."""

from hotcold.actors.private_ray.shared_imports import shared_imports


def main() -> None:
    """See `tests.actors.private_ray_script.main`."""
    with open(__file__), shared_imports():  # a file that the fork server must not keep open
        pass
    from tests.actors import private_ray_script

    private_ray_script.main()


if __name__ == "__main__":
    main()

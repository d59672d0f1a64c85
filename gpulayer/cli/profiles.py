"""`gpulayer profiles`: the names that stand for common combinations."""

from __future__ import annotations

from gpulayer.cli import options as opt
from gpulayer.cli.output import print_json, print_table


def list_profiles(json: opt.JsonOption = False) -> int:
    """List the profiles that --profile takes.

    Example: gpulayer profiles
    """
    from gpulayer_broker.profiles import all_profiles

    profiles = all_profiles()
    if json:
        print_json(
            {
                name: {"accelerator": profile.accelerator, "frameworks": dict(profile.frameworks)}
                for name, profile in profiles.items()
            }
        )
        return 0
    rows = [
        (name, profile.accelerator, ", ".join(f"{key}{text}" for key, text in profile.frameworks))
        for name, profile in profiles.items()
    ]
    print_table(("profile", "accelerator", "frameworks"), rows)
    return 0

"""The console script, and `python -m gpulayer` where the script is not on the PATH."""

try:
    from gpulayer import ctrl_c

    ctrl_c.begin()
    from gpulayer.cli import main
except KeyboardInterrupt:
    raise SystemExit(130) from None

if __name__ == "__main__":
    main()

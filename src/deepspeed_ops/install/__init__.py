"""``install.sh`` and ``ds_install``: one wheel, built once, onto this machine or onto every host of a list.

``command`` reads the options and leads; ``hosts`` reads host lists; ``source`` makes the wheel; ``transport`` asks and
copies (pdsh and pdcp, else ssh, or here); ``agent`` is the one file that runs on the hosts; ``table`` shows what they
answered. Needs the standard library only (and ``rich``, where it is there, for the bar): it runs before anything is
installed.
"""

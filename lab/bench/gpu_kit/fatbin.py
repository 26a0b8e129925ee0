"""Lists the device code inside a shared library, and clears (zeroes) what a Hopper card does not need."""

import struct
import sys
from pathlib import Path

ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")


def section(data, name):
    """(offset, size) of an ELF section."""
    shoff = struct.unpack_from("<Q", data, 0x28)[0]
    shentsize, shnum, shstrndx = struct.unpack_from("<HHH", data, 0x3A)

    def header(i):
        return struct.unpack_from("<IIQQQQIIQQ", data, shoff + i * shentsize)

    strings = header(shstrndx)[4]
    for i in range(shnum):
        h = header(i)
        end = data.index(b"\0", strings + h[0])
        if bytes(data[strings + h[0] : end]) == name:
            return h[4], h[5]
    return None


def entries(data):
    """(container index, header offset, payload offset, payload size, kind, arch, flags) of each entry."""
    off, size = section(data, b".nv_fatbin")
    pos, end, index = off, off + size, 0
    while pos < end - 16:
        magic, version, hsize, fat = struct.unpack_from("<IHHQ", data, pos)
        if magic != 0xBA55ED50:
            pos += 8
            continue
        p, stop = pos + hsize, pos + hsize + fat
        while p < stop:
            f = ENTRY.unpack_from(data, p)
            kind, h, payload, arch, flags, raw, comp = f[0], f[2], f[3], f[8], f[11], f[13], f[4]
            yield index, p, p + h, payload, kind, arch, flags, raw, comp
            p += h + payload
        pos = (stop + 7) // 8 * 8
        index += 1


if __name__ == "__main__":
    data = Path(sys.argv[1]).read_bytes()
    total = {}
    n = 0
    for e in entries(data):
        key = ({1: "ptx", 2: "elf"}.get(e[4], e[4]), e[5], hex(e[6]))
        t = total.setdefault(key, [0, 0, 0])
        t[0] += 1
        t[1] += e[3]
        t[2] += e[7]
        n = max(n, e[0] + 1)
    print(n, "containers")
    for k, v in sorted(total.items(), key=str):
        print(k, v)

"""Build hook: the gRPC stubs are generated from proto/dataserver.proto into renaissance/data/wire, never edited."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
WIRE = ROOT / "renaissance" / "data" / "wire"


class BuildWithStubs(build_py):
    """Generates the stubs in the source tree before the packages are collected (also for editable installs)."""

    def run(self) -> None:
        generate_stubs()
        super().run()


def generate_stubs() -> None:
    """Write dataserver_pb2.py and dataserver_pb2_grpc.py, with the import between them made relative."""
    from grpc_tools import protoc

    WIRE.mkdir(exist_ok=True)
    (WIRE / "__init__.py").write_text('"""Generated from proto/dataserver.proto at build time; do not edit."""\n')
    status = protoc.main(
        ["protoc", f"-I{ROOT / 'proto'}", f"--python_out={WIRE}", f"--grpc_python_out={WIRE}", "dataserver.proto"]
    )
    if status:
        raise SystemExit(f"proto/dataserver.proto: protoc failed with status {status}")
    grpc_stub = WIRE / "dataserver_pb2_grpc.py"
    text = grpc_stub.read_text()
    grpc_stub.write_text(text.replace("import dataserver_pb2 as", "from . import dataserver_pb2 as"))


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithStubs})

from acclimate import Accelerator


class AcmeAccelerator(Accelerator):
    name = "acme"
    device_type = "cpu"
    communication_backend = "gloo"
    visible_devices_variable = None
    op_builders = {"ScaleBuilder": "acme.ops.scale:ScaleBuilder"}  # noqa: RUF012

    def op_compile_flags(self, suffix: str = ".cpp", portable: bool = False) -> list[str]:
        return [*super().op_compile_flags(suffix, portable), "-DACME_FACTOR=3"]

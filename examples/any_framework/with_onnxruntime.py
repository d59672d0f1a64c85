"""A job for a worker whose Python has ONNX Runtime: a small model, on a GPU if one is free, else on the CPU.

    python with_onnxruntime.py

The model is made here with the package `onnx`; yours would be a file, given as an argument or with `--input`.
"""

import json

import gpulayer as gl

PROVIDERS = {
    "cuda": "CUDAExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "mps": "CoreMLExecutionProvider",
    "cpu": "CPUExecutionProvider",
}


@gl.remote(accelerator="any", frameworks={"onnxruntime": ">=1.18", "onnx": ">=1.16"})
def predict(weights: list[list[float]], row: list[float]) -> dict[str, object]:
    """The sum of what a layer of these weights, with ReLU, makes of a row."""
    import os

    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["row", "weights"], ["product"]),
            helper.make_node("Relu", ["product"], ["layer"]),
        ],
        "layer",
        [helper.make_tensor_value_info("row", TensorProto.FLOAT, [1, len(row)])],
        [helper.make_tensor_value_info("layer", TensorProto.FLOAT, [1, len(weights[0])])],
        [numpy_helper.from_array(np.array(weights, np.float32), "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    wanted = PROVIDERS[os.environ["GPULAYER_ACCELERATOR"]]
    # A build without that provider computes on the CPU: the device that comes back says so.
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[wanted])
    [layer] = session.run(None, {"row": np.array([row], np.float32)})
    return {
        "framework": f"onnxruntime {onnxruntime.__version__}",
        "device": session.get_providers()[0],
        "value": float(layer.sum()),
    }


if __name__ == "__main__":
    grid = [[(i * 7 + j * 3) % 11 - 5.0 for j in range(6)] for i in range(4)]
    print(json.dumps(predict.delay(grid, [1.0, -2.0, 0.5, 3.0]).result()))

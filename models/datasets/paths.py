"""Data by path: folders of images or text, and files of arrays or tables."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.errors import RequestError, error_text, nearest, shorten
from nlbench.options import Option
from nlbench.registry import Family
from nlbench.serialization.files import check_is_file
from nlbench.serialization.versions import files_version
from nlbench.subjects.data import dataset

from .images import CHANNELS, EXIF, SIZE, image_folder, shown_files
from .text import OPTIONS as TEXT_OPTIONS
from .text import TextWindows, text_files

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from nlbench.subjects.data import Data, Dataset

FORM = (
    "a path: a folder of images, .npy, .npz (x, y), .csv, .parquet, .pt, .safetensors, or a file "
    "or folder of text"
)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
TABLES = (".csv", ".parquet")
ARRAYS = (".npy", ".npz", ".pt", ".pth", ".safetensors")
TEXTS = (".txt", ".md", ".rst", ".log", ".tex", ".html", ".json", ".jsonl", ".xml")
_OTHER_SUFFIXES = (".zip", ".tar", ".gz", ".h5", ".hdf5", ".mat", ".pkl", ".pickle", ".xlsx")
_STARTS = ("./", "../", "/", "~", ".\\", "..\\")

MAX_TABLE_BYTES = 2**30
"""Maximum size of a table's file, which is read as a whole."""

INPUT_NAMES = ("x", "inputs", "data", "images", "features", "arr_0")
LABEL_NAMES = ("y", "labels", "label", "targets", "target", "arr_1")

LABEL = Option("", "column with the labels; without it, the rows have none")


class DataPaths(Family):
    """Data by path, without the family's name."""

    description = FORM
    claimed_form = FORM

    def claim(self, name: str) -> str:
        """Return a name that is or looks like a path."""
        suffixes = (*TABLES, *ARRAYS, *TEXTS, *IMAGE_SUFFIXES, *_OTHER_SUFFIXES)
        is_path = name.startswith(_STARTS) or name.lower().endswith(suffixes)
        return name if is_path or os.path.lexists(name) else ""

    def load(self, name: str) -> Callable[..., Data]:
        """Return the function that opens the data."""
        path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises for unknown users
        if not os.path.lexists(path):
            raise RequestError(f"there is no file or folder {shorten(name)}; expected {FORM}")
        suffix = path.suffix.lower()
        if path.is_dir():
            return _open_folder(path, name)
        if suffix in TABLES:
            options = {"label": LABEL}
            return _declare(partial(_table, path, name), name, options, "table", [path])
        if suffix in ARRAYS:
            return _declare(partial(_arrays, path, name), name, {}, "table", [path])
        if suffix in TEXTS:
            return _open_text(name, tuple(text_files(name)))
        raise RequestError(f"{shorten(name)}: expected {FORM}")


def _open_folder(path: Path, name: str) -> Callable[..., Data]:
    """Choose between images and text by the files in a folder."""
    files = list(itertools.islice(shown_files(path), 10_000))
    if any(file.suffix.lower() in IMAGE_SUFFIXES for file in files):
        options = {"size": SIZE, "channels": CHANNELS, "exif": EXIF}
        return _declare(partial(image_folder, path, name), name, options, "images", path)
    if any(file.suffix.lower() in TEXTS for file in files):
        texts = (file for file in text_files(name) if file.suffix.lower() in TEXTS)
        return _open_text(name, tuple(texts))
    what = f"no images and no text among {len(files)} files" if files else "no files"
    raise RequestError(f"{shorten(name)} holds {what}; expected {FORM}")


def _open_text(name: str, files: tuple[Path, ...]) -> Callable[..., Data]:
    return _declare(partial(TextWindows, name, files), name, TEXT_OPTIONS, "text", files)


def _declare(
    build: Callable[..., Any],
    name: str,
    options: dict[str, Option],
    owner: str,
    files: Sequence[Path] | Path,
) -> Callable[..., Any]:
    """Declare the options of a function that opens files, or those below a folder."""

    def fingerprint(**_: Any) -> str:
        return files_version(files if isinstance(files, Sequence) else list(shown_files(files)))

    build.__doc__ = f"Data in {name}."
    return dataset(options=options, fingerprint=fingerprint, owner=owner)(build)


def _table(path: Path, name: str, label: str) -> Dataset:
    """Read a table of numbers, with the labels in one column."""
    import torch

    from nlbench.subjects.own_data import make_dataset
    from nlbench.subjects.samples import InMemoryItems

    frame = _read_table(path, name)
    if not len(frame):
        raise RequestError(f"{name} has no rows, expected a table of numbers")
    labels = None
    classes = 0
    if label:
        if label not in frame.columns:
            hint = nearest(label, map(str, frame.columns))
            raise RequestError(f"{name} has no column '{shorten(label)}'{hint}")
        column = frame.pop(label)
        if column.isna().any():
            raise RequestError(f"{name}: the column '{label}' has empty cells, expected labels")
        if column.dtype.kind == "f" and bool((column % 1 != 0).any()):
            raise RequestError(
                f"{name}: the column '{label}' has fractions, expected class labels; leave out "
                "table.label and drop the column to measure without labels"
            )
        labels, classes = _class_indices(column)
    rows = torch.from_numpy(_numbers(frame, name))
    text = f"{frame.shape[1]} columns of {name} as they are{_describe_scale(frame)}"
    text += f"; labels: {label}" if label else ""
    return make_dataset(name, InMemoryItems(rows, labels), classes, text)


def _describe_scale(frame: pd.DataFrame) -> str:
    """Describe column names that are numbers other than those of the columns."""
    import pandas as pd

    names = list(map(str, frame.columns))
    if names == list(map(str, range(len(names)))) or not names:
        return ""
    if pd.to_numeric(pd.Series(names), errors="coerce").isna().any():
        return ""
    return f", named {names[0]} to {names[-1]} by the first line"


def _class_indices(column: pd.Series[Any]) -> tuple[np.ndarray[Any, Any], int]:
    """Return labels as class indices, and the number of classes.

    Integers from 0 are indices already; other labels are numbered in sorted order.
    """
    import numpy as np
    import pandas as pd

    numbers = column.to_numpy()
    if numbers.dtype.kind in "iuf" and numbers.min() >= 0:
        indices = numbers.astype(np.int64)
        return indices, int(indices.max()) + 1
    codes, values = pd.factorize(column, sort=True)
    return codes, len(values)


def _read_table(path: Path, name: str) -> pd.DataFrame:
    import pandas as pd

    check_is_file(path, MAX_TABLE_BYTES)
    try:
        if path.suffix.lower() == ".parquet":
            return pd.read_parquet(path)
        separator = _separator(path)
        first = pd.read_csv(path, sep=separator, header=None, nrows=1, dtype=str).iloc[0]
        header = 0 if _is_header(first) else None
        with warnings.catch_warnings():
            # Rows that are longer than the header would lose their last cells.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(path, sep=separator, header=header, index_col=False)
            if header is None and _starts_with_scale(frame):
                frame = pd.read_csv(path, sep=separator, header=0, index_col=False)
        frame.columns = frame.columns.map(str)
        return _drop_index(frame)
    except ImportError as error:
        raise RequestError(f"{name}: pip install 'nlbench[parquet]' ({error})") from error
    except Exception as error:
        # Damaged files raise almost any error.
        raise RequestError(f"can't read {name}: {error_text(error)}") from error


def _separator(path: Path) -> str:
    """Return the most frequent separator of the first line, a comma unless others are."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        line = file.readline()
    return max(",;\t", key=line.count)


def _is_header(cells: pd.Series[Any]) -> bool:
    """Return True if the cells of a first line are names, or the numbers of the columns."""
    import pandas as pd

    names = cells[1:] if pd.isna(cells.iloc[0]) else cells  # The index has no name.
    is_numbered = len(names) > 1 and list(names) == [str(i) for i in range(len(names))]
    return is_numbered or bool(pd.to_numeric(names.fillna("0"), errors="coerce").isna().any())


def _starts_with_scale(frame: pd.DataFrame) -> bool:
    """Return True if the first of several rows has equal steps and most others don't.

    It then names the columns, as wavelengths do. Three numbers, which may have equal steps by
    chance, must also be integers above fractions.
    """
    import numpy as np
    import pandas as pd

    numbers = frame.head(1000).apply(pd.to_numeric, errors="coerce").to_numpy(dtype=float)
    with np.errstate(invalid="ignore"):
        if np.isnan(numbers[0, 0]) and (numbers[1:, 0] % 1 == 0).all():
            numbers = numbers[:, 1:]  # The index has no name.
        if len(numbers) < 2 or numbers.shape[1] < 3:
            return False
        steps = np.diff(numbers, axis=1)
        is_even = (steps[:, 0] != 0) & np.isclose(steps, steps[:, :1], atol=0).all(1)
        is_integral = (numbers % 1 == 0).all(1)
    is_scale = numbers.shape[1] > 3 or (is_integral[0] and not is_integral[1:].any())
    return bool(is_scale and is_even[0] and is_even[1:].mean() < 0.5)


def _drop_index(frame: pd.DataFrame) -> pd.DataFrame:
    """Remove the index that pandas writes: a first column without a name, of distinct integers."""
    first = frame.columns[0]
    column = frame[first]
    is_index = first == "Unnamed: 0" and column.dtype.kind in "iu" and column.is_unique
    return frame.drop(columns=first) if is_index else frame


def _numbers(frame: pd.DataFrame, name: str) -> np.ndarray[Any, Any]:
    """Return the columns as float32, and raise if one isn't numeric or finite."""
    import numpy as np
    import pandas as pd

    if not frame.shape[1]:
        raise RequestError(f"{name} has no columns of numbers")
    for column, values in frame.items():
        if values.dtype.kind not in "iufb":
            is_text = pd.to_numeric(values.astype(str), errors="coerce").isna() & values.notna()
            row = int(is_text.to_numpy().argmax())
            raise RequestError(
                f"{name}: row {row + 1} of the column '{shorten(column)}' is "
                f"'{shorten(values.iloc[row])}', expected a number; if the column holds the "
                f"labels, use --set 'table.label={column}'"
            )
    numbers = frame.to_numpy(dtype=np.float32, copy=True)
    if not np.isfinite(numbers).all():
        row, position = (int(i) for i in np.argwhere(~np.isfinite(numbers))[0])
        raise RequestError(
            f"{name}: row {row + 1} of the column '{shorten(frame.columns[position])}' is empty or "
            "not finite, expected numbers"
        )
    return numbers


def _arrays(path: Path, name: str) -> Dataset:
    """Read inputs, and labels if there are any, from a file of arrays."""
    from nlbench.subjects.own_data import as_dataset

    check_is_file(path)
    inputs, labels, what = _choose_arrays(_read_arrays(path, name), name)
    inputs, change = _as_inputs(inputs, name)
    opened = as_dataset(name, inputs if labels is None else (inputs, labels))
    text = opened.preprocessing.replace(f"as {name} has it", f"{what}{change}")
    return replace(opened, preprocessing=text)


def _read_arrays(path: Path, name: str) -> Any:
    import numpy as np

    suffix = path.suffix.lower()
    try:
        if suffix == ".npy":
            return np.load(path, allow_pickle=False)
        if suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {key: archive[key] for key in archive.files}
    except Exception as error:
        # Damaged files raise almost any error. NumPy takes unknown bytes for a pickle.
        is_pickle = "allow_pickle" in str(error)
        text = "no array of numbers" if is_pickle else error_text(error)
        raise RequestError(f"can't read {name}: {text}") from error
    from nlbench.subjects.weights import read_checkpoint

    return read_checkpoint(path)[0]


def _choose_arrays(content: Any, name: str) -> tuple[Any, Any, str]:
    """Return the inputs and labels in a file's content, and their description."""
    import numpy as np
    import torch

    if isinstance(content, np.ndarray | torch.Tensor):
        return content, None, f"the array of {name}"
    if isinstance(content, tuple | list) and len(content) in (1, 2):
        content = dict(zip(("x", "y"), content, strict=False))
    if not isinstance(content, dict) or not content:
        raise RequestError(f"{name} holds a {type(content).__name__}, expected arrays x and y")
    inputs = next((key for key in INPUT_NAMES if key in content), None)
    labels = next((key for key in LABEL_NAMES if key in content), None)
    if inputs is None and len(content) == 1:
        inputs = next(iter(content))
    if inputs is None:
        found = ", ".join(map(str, itertools.islice(content, 6)))
        raise RequestError(f"{name} has the arrays {found}; expected x, or x and y")
    if not isinstance(content[inputs], np.ndarray | torch.Tensor):
        kind = type(content[inputs]).__name__
        raise RequestError(f"{name}: {inputs} is a {kind}, expected an array")
    text = f"{inputs} of {name}" + (f", labels {labels}" if labels else "")
    others = [str(key) for key in content if key not in (inputs, labels)]
    text += f"; without {shorten(', '.join(others))}" if others else ""
    return content[inputs], content[labels] if labels else None, text


def _as_inputs(array: Any, name: str) -> tuple[Any, str]:
    """Convert images of bytes to [0, 1] with channels first, and return other arrays as given."""
    import numpy as np
    import torch

    from nlbench.subjects.inputs import dense
    from nlbench.subjects.own_data import native_array

    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "iufb" or (array.dtype.kind == "u" and array.itemsize > 1):
            raise RequestError(
                f"{name} holds {array.dtype}, expected floats, signed integers or bytes"
            )
        array = torch.from_numpy(native_array(array))
    tensor = dense(name, array)
    is_bytes = tensor.dtype == torch.uint8
    if tensor.dtype == torch.bool or tensor.is_floating_point():
        # Check after the conversion, which may overflow.
        tensor = tensor.float()
        if not bool(torch.isfinite(tensor).all()):
            raise RequestError(
                f"{name} contains NaN, infinities or numbers beyond float32, expected finite inputs"
            )
    if not is_bytes:
        return tensor, ""
    change = ", divided by 255"
    if tensor.ndim == 3:
        tensor = tensor[:, None]
        change += ", one channel"
    elif tensor.ndim == 4 and tensor.shape[-1] in (1, 3) and tensor.shape[1] not in (1, 3):
        tensor = tensor.permute(0, 3, 1, 2)
        change += ", channels first"
    return tensor.contiguous().float() / 255, change

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from nlbench import registry
from nlbench.errors import RequestError
from nlbench.subjects.data import dataset_info
from nlbench.subjects.load import load_dataset


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def draw_image(path, size=(12, 8), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    pixels[:, : size[0] // 2] = (255, 0, 0)
    Image.fromarray(pixels).save(path, **options)


def test_folders_of_images_are_data(folder):
    for name in ("cat/1.png", "dog/1.png", "dog/.ipynb_checkpoints/1-copy.png", "dog/._1.png"):
        draw_image(folder / "my imgs" / name)
    dataset = load_dataset("./my imgs", {"size": "8"})
    assert (dataset.shape, dataset.classes, len(dataset.test)) == ((3, 8, 8), 2, 2)


@pytest.mark.parametrize(
    ("sizes", "side"),
    [([(12, 12)] * 3, 12), ([(12, 12), (14, 14)], 224), ([(12, 8)], 224), ([(300, 300)], 224)],
)
def test_small_squares_of_one_size_are_not_enlarged(folder, sizes, side):
    for index, size in enumerate(sizes):
        draw_image(folder / "imgs" / f"{index}.png", size=size)
    dataset = load_dataset("./imgs")
    assert dataset.shape == (3, side, side)
    if side == 12:
        pixels = torch.from_numpy(np.array(Image.open(folder / "imgs" / "0.png"))).float() / 255
        std = torch.tensor(dataset.std)[:, None, None]
        mean = torch.tensor(dataset.mean)[:, None, None]
        inputs = dataset.sample(1).inputs[0]
        torch.testing.assert_close(inputs * std + mean, pixels.permute(2, 0, 1))


def test_left_out_files_are_counted(folder):
    draw_image(folder / "imgs" / "1.png")
    for name in ("2.gif", "3.gif", "4.jfif", ".DS_Store"):
        (folder / "imgs" / name).write_bytes(b"")
    assert load_dataset("./imgs").test.left_out() == "3 files left out (2 .gif, 1 .jfif)"


def test_single_channel_is_the_luminance(folder):
    draw_image(folder / "imgs" / "1.png", size=(8, 8))
    dataset = load_dataset("./imgs", {"size": 8, "channels": "1"})
    image = dataset.sample(1).images[0]
    assert image.shape == (1, 8, 8)
    assert image.max().item() == pytest.approx(0.299, abs=0.05)


@pytest.mark.parametrize(("exif", "shape"), [(False, "wide"), (True, "tall")])
def test_exif_rotates_only_on_request(folder, exif, shape):
    data = Image.Exif()
    data[0x0112] = 6  # rotated by a quarter turn
    draw_image(folder / "imgs" / "1.jpg", size=(16, 16), exif=data)
    image = load_dataset("./imgs", {"size": 16, "exif": exif}).sample(1).images[0, 0]
    halves = {"wide": image[:, :4].mean() - image[:, -4:].mean()}
    halves["tall"] = image[:4].mean() - image[-4:].mean()
    assert max(halves, key=halves.get) == shape


ROWS = np.arange(24.0).reshape(6, 4)
LABELS = np.array([0, 1, 2, 0, 1, 2])


def write_arrays(folder):
    np.save(folder / "x.npy", ROWS)
    np.savez(folder / "x.npz", x=ROWS, y=LABELS)
    frame = pd.DataFrame(ROWS, columns=list("abcd"))
    labelled = frame.assign(kind=["cat", "dog", "emu"] * 2)
    labelled.to_csv(folder / "x.csv", index=False)
    frame.to_csv(folder / "plain.csv", index=False, header=False)
    labelled.to_parquet(folder / "x.parquet")
    tensors = {"x": torch.from_numpy(ROWS), "y": torch.from_numpy(LABELS)}
    torch.save((tensors["x"], tensors["y"]), folder / "x.pt")
    save_file(tensors, folder / "x.safetensors")


@pytest.mark.parametrize(
    ("name", "options"),
    [("x.npz", {}), ("x.csv", {"label": "kind"}), ("x.parquet", {"label": "kind"}), ("x.pt", {}),
     ("x.safetensors", {})],
)  # fmt: skip
def test_files_with_labels_hold_the_same_samples(folder, name, options):
    write_arrays(folder)
    dataset = load_dataset(name, options)
    sample = dataset.sample(None)
    assert (dataset.shape, dataset.classes) == ((4,), 3)
    assert sample.inputs.dtype == torch.float32
    assert torch.equal((sample.inputs[:, 0] / 4).long() % 3, sample.labels)


@pytest.mark.parametrize("name", ["x.npy", "plain.csv"])
def test_files_without_labels_have_none(folder, name):
    write_arrays(folder)
    sample = load_dataset(name).sample(None)
    assert sample.labels is None
    assert sorted(sample.inputs[:, 0].tolist()) == ROWS[:, 0].tolist()


@pytest.mark.parametrize("columns", [list("abcd"), range(4)], ids=str)
@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_tables_as_pandas_writes_them_hold_their_values(folder, columns, has_index, separator):
    frame = pd.DataFrame(ROWS + 0.5, columns=columns)
    frame.to_csv(folder / "x.csv", index=has_index, sep=separator)
    sample = load_dataset("x.csv").sample(None)
    assert sorted(sample.inputs[:, 0].tolist()) == (ROWS[:, 0] + 0.5).tolist()
    assert sample.inputs.shape == ROWS.shape


NOISE = np.random.default_rng(0).normal(size=(5, 6)).round(3)


@pytest.mark.parametrize(
    ("names", "rows", "is_header"),
    [
        ([400, 410, 420, 430, 440, 450], NOISE, True),
        ([1, 2, 3, 4, 5, 6], NOISE, True),
        (["0.0", 0.5, "1.0", 1.5, "2.0", 2.5], NOISE, True),
        ([3, 2, 1], NOISE[:, :3], True),
        ([1, 2, 3, 4], np.arange(20).reshape(5, 4) + 7, False),
        ([1, 2, 3], (NOISE[:, :3] * 10).round().astype(int), False),
        ([2, 2, 2, 2], NOISE[:, :4], False),
        ([400, 410], NOISE[:, :2], False),
        ([0.1, 0.3, 0.4, 0.5], NOISE[:, :4], False),
    ],
)
def test_numbers_with_equal_steps_name_columns(folder, names, rows, is_header):
    for has_index in {False, is_header}:
        pd.DataFrame(rows, columns=names).to_csv(folder / "x.csv", index=has_index)
        data = load_dataset("x.csv")
        assert len(data.sample(None).inputs) == 5 + (not is_header)
        assert (f"named {names[0]} to {names[-1]}" in data.preprocessing) == is_header


def test_indices_in_any_order_are_left_out(folder):
    pd.DataFrame(ROWS).iloc[::-1].to_csv(folder / "x.csv")
    assert load_dataset("x.csv").shape == ROWS.shape[1:]


def test_unused_arrays_of_a_file_are_named(folder):
    np.savez(folder / "x.npz", x=ROWS, mask=ROWS, weight=ROWS)
    assert "without mask, weight" in load_dataset("x.npz").preprocessing


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", "<f2", "?", "g"])
def test_arrays_of_any_byte_order_are_read(folder, dtype):
    np.save(folder / "x.npy", (ROWS % 2).astype(dtype))
    sample = load_dataset("x.npy").sample(None)
    assert sorted(sample.inputs[:, 1].tolist()) == [1] * 6


def test_bytes_are_images(folder):
    pixels = np.full((5, 6, 7, 3), 255, np.uint8)
    np.savez(folder / "x.npz", x=pixels, y=np.zeros(5, int))
    sample = load_dataset("x.npz").sample(2)
    assert sample.inputs.shape == (2, 3, 6, 7)
    assert sample.inputs.max().item() == 1


@pytest.mark.parametrize("name", ["corpus.txt", "./texts"])
def test_text_is_cut_into_windows(folder, name):
    (folder / "texts").mkdir()
    for path in ("corpus.txt", "texts/1.txt", "texts/2.md", "texts/3.txt", "texts/4.txt"):
        (folder / path).write_text("some text. " * 400)
    assert load_dataset(name, {"length": 16}).sample(4).inputs.shape[1] == 16


@pytest.mark.parametrize(
    ("name", "options", "wrong"),
    [
        ("./nowhere", {}, "nowhere"),
        ("file.xyz", {}, "file.xyz"),
        ("./empty", {}, "empty"),
        ("./other", {}, "other"),
        ("object.npy", {}, "object.npy"),
        ("garbage.npy", {}, "garbage.npy"),
        ("wide.npy", {}, "uint16"),
        ("flat.npy", {}, r"\(6,\)"),
        ("names.npz", {}, "arrays a, b"),
        ("nan.npy", {}, "NaN"),
        ("cut.npz", {}, "cut.npz"),
        ("large.npz", {}, "large.npz"),
        ("x.csv", {}, "row 1 of the column 'kind'"),
        ("mark.csv", {}, r"row 2 of the column 'a' is '\?'"),
        ("x.csv", {"label": "knd"}, "'knd'.*'kind'"),
        ("x.csv", {"lable": "kind"}, "'lable'.*'label'"),
        ("empty.csv", {}, "empty.csv"),
        ("ragged.csv", {}, "ragged.csv"),
        ("gap.csv", {}, "'b'"),
        ("broken.parquet", {}, "broken.parquet"),
        ("state.pt", {}, "state.pt"),
        ("sparse.pt", {}, "sparse.pt"),
        ("quantised.pt", {}, "quantised.pt"),
    ],
)
def test_unusable_paths_raise_in_one_line(folder, name, options, wrong):
    write_arrays(folder)
    for path in ("empty", "other"):
        (folder / path).mkdir()
    for path in ("file.xyz", "other/a.bin", "empty.csv", "cut.npz", "broken.parquet"):
        (folder / path).write_bytes(b"" if path == "empty.csv" else b"PK no")
    (folder / "ragged.csv").write_text("a,b\n1,2,3,4\n")
    (folder / "mark.csv").write_text("a,b\n1,2\n?,3\n")
    np.savez(folder / "large.npz", x=np.full((3, 2), 1e39))
    (folder / "gap.csv").write_text("a,b\n1,2\n3,\n")
    np.save(folder / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    (folder / "garbage.npy").write_text("hello")
    np.save(folder / "wide.npy", ROWS.astype(np.uint16))
    np.save(folder / "flat.npy", ROWS[:, 0])
    np.save(folder / "nan.npy", np.full((3, 2), np.nan))
    np.savez(folder / "names.npz", a=ROWS, b=ROWS)
    torch.save({"weight": torch.zeros(2), "bias": torch.zeros(2)}, folder / "state.pt")
    rows = torch.from_numpy(ROWS).float()
    torch.save(rows.to_sparse(), folder / "sparse.pt")
    torch.save(torch.quantize_per_tensor(rows, 0.1, 0, torch.qint8), folder / "quantised.pt")
    with pytest.raises(RequestError, match=wrong) as caught:
        load_dataset(name, options).sample(2)
    assert "\n" not in str(caught.value)


def test_the_fingerprint_changes_with_a_file(folder):
    write_arrays(folder)
    draw_image(folder / "imgs" / "deep" / "1.png")
    for name, file in (("x.npy", "x.npy"), ("./imgs", "imgs/deep/1.png")):
        fingerprint = dataset_info(registry.load("datasets", name)).fingerprint
        before = fingerprint()
        (folder / file).write_bytes((folder / file).read_bytes() + b" ")
        assert fingerprint() != before


def test_dead_links_to_images_are_named(folder):
    draw_image(folder / "imgs" / "1.png")
    (folder / "imgs" / "notes").symlink_to("nowhere")
    (folder / "imgs" / "2.png").symlink_to("nowhere.png")
    assert dataset_info(registry.load("datasets", "./imgs")).fingerprint()
    with pytest.raises(RequestError):
        load_dataset("./imgs").sample(None)

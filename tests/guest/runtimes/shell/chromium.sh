# Chromium without a window: scripts, a worker, a picture.
set -eu
cd "$(mktemp -d)"
export HOME=$PWD
cat > page.html <<'END'
<body><p id=sum></p><p id=worker></p><script>
document.getElementById('sum').textContent = Array.from({length: 1e6}, (_, i) => i).reduce((a, b) => a + b)
const source = URL.createObjectURL(new Blob(['postMessage(6 * 7)']))
new Worker(source).onmessage = (event) => { document.getElementById('worker').textContent = event.data }
</script></body>
END
browser() {
    /usr/lib/chromium/chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run \
        --disable-background-networking --disable-component-update --disable-sync --disable-breakpad \
        --user-data-dir="$PWD/user" --virtual-time-budget=2000 "$@" "file://$PWD/page.html" 2>log
}
browser --dump-dom
browser --screenshot="$PWD/page.png" --window-size=320,200
file -b page.png

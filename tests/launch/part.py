"""A scripted part of a run: serves /health, writes lines, starts a child of its own, ends as told."""

import argparse
import http.server
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--after", type=float, default=600.0)
parser.add_argument("--code", type=int, default=0)
parser.add_argument("--say", default="")
parser.add_argument("--deaf", action="store_true", help="ignores SIGTERM")
parser.add_argument("--grandchild", help="file for the pid of a sleeping child that ignores SIGTERM")
args = parser.parse_args()


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["Authorization"] == "Bearer secret" else 401)
        self.end_headers()

    def log_message(self, *_):
        pass


if args.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if args.grandchild:
    code = "import os,signal,sys,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1],'w').write(str(os.getpid())); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code, args.grandchild])
    while not (Path(args.grandchild).exists() and Path(args.grandchild).stat().st_size):
        time.sleep(0.02)
if args.port:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
if args.say:
    print(args.say, flush=True)
time.sleep(args.after)
sys.exit(args.code)

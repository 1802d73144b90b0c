"""Scratch."""
from __future__ import annotations
import argparse, json, pickle, sys, time
from collections import Counter
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from statistics import median
import numpy as np
from rest_local.bench.prompts import ensure
from rest_local.calibration.cost import CostCurve
from rest_local.calibration.curves import load_curve
from rest_local.decoding import sequence as decoding
from rest_local.decoding.counts import Statistics
from rest_local.decoding.forward import Forward
from rest_local.decoding.request import Request
from rest_local.decoding.stream import Answer
from rest_local.drafting import recycled as R
from rest_local.drafting.recycled import SuccessorTable
from rest_local.drafting.sources import Sources
from rest_local.kv_cache.backend import Capability
from rest_local.kv_cache.slot import Slot
from rest_local.llama.context import Context, ContextSettings
from rest_local.llama.model import Model
from rest_local.llama.vocabulary import Detokenizer
from rest_local.paths import demo_model
from rest_local.planning.auto import Auto
from rest_local.retrieval.datastore import Datastore

DRIVER_MS=(0.05,0.15); LOOKUP_MS=0.15; ROW_MS=0.04
class OnCurve(Auto):
    rows=None
    def __init__(self,curve,table=None):
        super().__init__(curve); self.successors=table; self.tally=Counter()
        if table is not None: table.row_ms=ROW_MS
    @property
    def logits_ms(self):
        return super().logits_ms if self.rows is None else float(self.successors is not None)
    def learn_logits(self,rows):
        before=self.successors.rows_read
        if self.rows is None: super().learn_logits(rows)
        else:
            for pair,row in islice(rows,self.rows): self.successors.read(pair,row)
        n=self.successors.rows_read-before
        self.tally["rows"]+=n; self.tally["ms"]+=n*ROW_MS
    def learn(self,drafted,tokens,done):
        ms=float(self.curve.at(done.n_ctx)[done.n_nodes]); d=DRIVER_MS[done.n_nodes>0]
        l=None if done.lookup_ms is None else LOOKUP_MS
        self.tally["ms"]+=ms+d+(l or 0); self.tally["plain"]+=(done.n_accepted+1)*(float(self.curve.at(done.n_ctx)[0])+DRIVER_MS[0])
        super().learn(drafted,tokens,done._replace(decode_ms=ms,driver_ms=d,lookup_ms=l,updates_curve=False))
class Table(SuccessorTable):
    def _now(self): return 1e-3*ROW_MS*self.rows_read
class Recorded:
    def __init__(self,tokens): self.t=tokens; self.at=0
    def sample(self,row): return self.t[self.at]
    def accept(self,token): self.at+=1
    def close(self): pass
def curve_of(name):
    if name.startswith('flat'): return CostCurve.from_points([0],[1,64],[[10.0,10.0*float(name[4:])]])
    return load_curve(name)
def never(t): return False
def one(model,context,slot,pol,sources,prompt,answer):
    n=len(answer)
    seq=decoding.Sequence(Request(prompt,max_tokens=n),pol,Recorded(answer),Answer(Statistics(),Detokenizer(model.vocabulary.piece),n,(),never),lambda s:sources,never)
    f=Forward(context,Capability("tree","bench"),overlaps=False)
    seq.admit(slot)
    f.evaluate_prompt(seq)
    while len(seq.tokens)-len(prompt)<n:
        seq.answer.left=n-(len(seq.tokens)-len(prompt))
        f.step_alone(seq)
    assert seq.tokens[len(prompt):][:n]==answer
    return seq.statistics
def run(model,context,recs,curve,make,stores,warm=(),cls=OnCurve):
    pol=cls(curve_of(curve),make(model.n_vocab)); out=[]
    for i,r in enumerate([*warm,*recs]):
        sources=Sources(stores,model.n_vocab)
        slot=Slot(context); context.clear()
        t=Counter(pol.tally)
        st=one(model,context,slot,pol.fork(),sources,list(r[2]),list(r[3]))
        t2=pol.tally-t
        if i>=len(warm): out.append(dict(kind=r[0],title=r[1],steps=st.steps,gen=st.generated,drafted=st.drafted,ms=t2["ms"],plain=t2["plain"],rows=t2["rows"],by=st.by_source,speed=t2["plain"]/t2["ms"]))
    return out,pol
def summ(rows):
    by=Counter()
    for r in rows:
        for k,v in r["by"].items(): by[k]+=v["drafted"]; by[k,"a"]+=v["accepted"]
    g=sum(r["gen"] for r in rows); n=sum(r["steps"] for r in rows)
    return f"mat {g/n:.3f} nodes {sum(r['drafted'] for r in rows)/n:.2f} steps {n} speed {sum(r['plain'] for r in rows)/sum(r['ms'] for r in rows):.4f} rows {sum(r['rows'] for r in rows)/n:.2f} logits {by['logits']}/{by['logits','a']}"
def main():
    ap=argparse.ArgumentParser(); ap.add_argument("--curve",action="append"); ap.add_argument("--variants",nargs="+",default=["none","k8"]); ap.add_argument("--kinds",nargs="+",default=["stored","unseen"]); ap.add_argument("--limit",type=int,default=15); ap.add_argument("--store",action="store_true"); ap.add_argument("--warm",type=int,default=0); ap.add_argument("--cells",action="store_true")
    a=ap.parse_args()
    rec=pickle.load(open("/work/wt/scratch-logits/rec.pkl","rb"))
    class Uni(Table):
        def successors(self,pair): return super().successors((-1,pair[1]))
    class Bi(Table):
        def successors(self,pair): return [x for x in super().successors(pair) if x[3]==1]
    class NoGuess(Table):
        def guesses(self,pair): return []
    class One(Table):
        def successors(self,pair): return [x for x in super().successors(pair) if x[1]<1]
    class Two(Table):
        def successors(self,pair): return [x for x in super().successors(pair) if x[1]<2]
    class NoRej(OnCurve): rows=1
    class Guess(OnCurve):
        guesses=True
    class Guess64(Guess): rows=64
    class Three(OnCurve): rows=3
    class Many(OnCurve): rows=64
    makes={"none":(lambda n:None,OnCurve),"k4":(lambda n:Table(n,4),OnCurve),"k8":(lambda n:Table(n,8),OnCurve),"k16":(lambda n:Table(n,16),OnCurve),"uni":(Uni,OnCurve),"bi":(Bi,OnCurve),"one":(One,OnCurve),"two":(Two,OnCurve),"rows1":(lambda n:Table(n,8),NoRej),"rows3":(lambda n:Table(n,8),Three),"rows64":(lambda n:Table(n,8),Many)}
    stores=[Datastore.open(ensure(demo_model()))] if a.store else []
    with Model.open(demo_model()) as model, Context(model,ContextSettings(n_ctx=2048,threads=1)) as context:
        warm=[r for r in rec if r[0]=="unseen"][15:15+a.warm]
        for kind in a.kinds:
            recs=[r for r in rec if r[0]==kind][:a.limit]
            for curve in a.curve or ["rtx3090-8b-q4_0"]:
                base=None
                for v in a.variants:
                    t0=time.time(); make,cls=makes[v]
                    rows,pol=run(model,context,recs,curve,make,stores,warm,cls)
                    base=base or rows
                    ratio=[y["ms"]/x["ms"] for x,y in zip(rows,base)]
                    print(f"{kind:7} {curve:20} {v:6}",summ(rows),f"vs first: median {median(ratio):.4f} mean {np.mean(ratio):.4f} min {min(ratio):.3f} max {max(ratio):.3f} [{time.time()-t0:.0f}s]",flush=True)
                    if a.cells and v!="none":
                        c=pol.acceptance.drain()
                        for paired in (0,1,2):
                            for rank in range(2):
                              for riv in range(3):
                                for ag in (0,1):
                                  line=[]
                                  for level in range(10):
                                    h,n=c.get(R.logits_cell(rank,level,paired,riv,bool(ag)),(0,0))
                                    line.append(f"{h/max(n,1):.2f}/{int(n)}")
                                  print(("uni","pair","guess")[paired],rank,("none","weak","strong")[riv],"agrees" if ag else "new   ",*line)
if __name__=="__main__": main()

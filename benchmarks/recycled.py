"""Scratch."""
from __future__ import annotations
import argparse, json, sys, time
from collections import Counter, defaultdict
from itertools import islice
from statistics import median
import numpy as np
from benchmarks.speed import prompts
from rest_local.bench.demo import choose_sampling
from rest_local.bench.prompts import ensure
from rest_local.calibration.curves import load_curve
from rest_local.decoding.engine import Engine
from rest_local.drafting.recycled import SuccessorTable
from rest_local.paths import demo_model
from rest_local.planning.auto import Auto
from rest_local.planning.policy import StepCost

DRIVER_MS=(0.05,0.15); LOOKUP_MS=0.15; ROW_MS=0.04
class OnCurve(Auto):
    rows=3
    def __init__(self,curve,table=None):
        super().__init__(curve); self.successors=table; self.tally={"ms":0.0,"rows":0,"lookups":0}
    @property
    def logits_ms(self): return 1.0 if self.successors is not None else 0.0
    def learn_logits(self,rows):
        n=0
        for pair,row in islice(rows,self.rows):
            self.successors.read(pair,row); n+=1
        self.tally["rows"]+=n; self.tally["ms"]+=n*ROW_MS
    def learn(self,drafted,tokens,done):
        ms=float(self.curve.at(done.n_ctx)[done.n_nodes]); d=DRIVER_MS[done.n_nodes>0]
        l=None if done.lookup_ms is None else LOOKUP_MS
        self.tally["ms"]+=ms+d+(l or 0); self.tally["lookups"]+=l is not None
        super().learn(drafted,tokens,done._replace(decode_ms=ms,driver_ms=d,lookup_ms=l,updates_curve=False))
def run(engine, chosen, curve, make, n_tokens, passes=1, warm=()):
    out=[]
    pol=OnCurve(load_curve(curve),make())
    for p,s in warm:
        for _ in engine.generate(p.text,max_tokens=n_tokens,sampling=s,policy=pol.fork()): pass
    for _ in range(passes):
      out=[]
      for p,s in chosen:
        t=dict(pol.tally)
        st=engine.generate(p.text,max_tokens=n_tokens,sampling=s,policy=pol.fork())
        for _ in st: pass
        d=st.result.draft
        plain=d.generated*(float(pol.curve.at(600)[0])+DRIVER_MS[0])
        out.append(dict(kind=p.kind,title=p.title,tokens=st.result.tokens,steps=d.steps,gen=d.generated,drafted=d.drafted,accepted=d.accepted,ms=pol.tally["ms"]-t["ms"],plain=plain,by={k:(v.drafted,v.accepted) for k,v in d.by_source.items()},rows=pol.tally["rows"]-t["rows"]))
    return out,pol
def summ(rows):
    by=Counter(); 
    for r in rows:
        for k,(a,b) in r["by"].items(): by[k,"d"]+=a; by[k,"a"]+=b
    g=sum(r["gen"] for r in rows); 
    return dict(mat=round(g/sum(r["steps"] for r in rows),4),nodes=round(sum(r["drafted"] for r in rows)/sum(r["steps"] for r in rows),2),steps=sum(r["steps"] for r in rows),speed=round(sum(r["plain"] for r in rows)/sum(r["ms"] for r in rows),4),logits=(by["logits","d"],by["logits","a"]))
def main():
    ap=argparse.ArgumentParser(); ap.add_argument("--curve",action="append"); ap.add_argument("--tokens",type=int,default=160); ap.add_argument("--variants",nargs="+",default=["none","k4","k8","k16"]); ap.add_argument("--kinds",nargs="+",default=["stored","unseen"]); ap.add_argument("--limit",type=int,default=15); ap.add_argument("--store",action="store_true"); ap.add_argument("--warm",type=int,default=0); ap.add_argument("--cells",action="store_true"); ap.add_argument("--passes",type=int,default=1)
    a=ap.parse_args()
    import rest_local.drafting.recycled as R
    makes={"none":lambda n:None}
    for k in (4,8,16): makes[f"k{k}"]=lambda n,k=k:SuccessorTable(n,k)
    class Uni(SuccessorTable):
        def successors(self,pair): return super().successors((-1,pair[1]))
    class Bi(SuccessorTable):
        def successors(self,pair): return [x for x in super().successors(pair) if x[3]]
    makes["uni"]=lambda n:Uni(n,8); makes["bi"]=lambda n:Bi(n,8)
    stores=[ensure(demo_model())] if a.store else []
    with Engine.load(demo_model(),datastores=stores,n_ctx=2048,history=False) as e:
        warm=[(p,choose_sampling(e,p,a.tokens)) for p in [p for p in prompts() if p.kind=="unseen"][15:15+a.warm]]
        for kind in a.kinds:
            ps=[p for p in prompts() if p.kind==kind][:a.limit]
            chosen=[(p,choose_sampling(e,p,a.tokens)) for p in ps]
            for curve in a.curve or ["rtx3090-8b-q4_0"]:
                base=None
                for v in a.variants:
                    t0=time.time()
                    rows,pol=run(e,chosen,curve,lambda:makes[v](e.model.n_vocab),a.tokens,a.passes,warm)
                    if base is None: base=rows
                    same=sum(x["tokens"]==y["tokens"] for x,y in zip(rows,base))
                    ratio=[y["ms"]/y["gen"]/(x["ms"]/x["gen"]) for x,y in zip(rows,base)]
                    print(f"{kind:7} {curve:20} {v:6}",summ(rows),f"vs first: median {median(ratio):.4f} mean {np.mean(ratio):.4f} min {min(ratio):.3f} same {same}/{len(rows)} [{time.time()-t0:.0f}s]",flush=True)
                    if a.cells and v!="none":
                        c=pol.acceptance.drain()
                        for paired in (0,1):
                            for rank in range(3):
                                line=[]
                                for level in range(10):
                                    h=n=0
                                    for d in range(9):
                                        pass
                                    cells={R.logits_cell(rank,level,bool(paired),d) for d in range(9)}
                                    for x in cells:
                                        hh,nn=c.get(x,(0,0)); h+=hh;n+=nn
                                    line.append(f"{h/max(n,1):.2f}/{int(n)}")
                                print("   pair" if paired else "   uni",rank,line)
if __name__=="__main__": main()
